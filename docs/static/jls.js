// Marks what jls.css needs to know about a table. One with five columns or more is wide; of
// another that has long cells, a row is a card on a phone, with the cells one below the
// other. With three columns or more each then needs the title of its column.
// Code in a table may break after a bracket, comma, dot, underscore or equals sign, rather
// than anywhere.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const titles = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
    const cells = [...table.querySelectorAll("td:not(:first-child)")];
    const isWide = titles.length > 4;
    const isLong = cells.some((cell) => cell.textContent.length > 40);
    table.classList.toggle("wide", isWide);
    table.classList.toggle("cards", isLong && titles.length > 1 && !isWide);
    for (const row of table.querySelectorAll("tbody tr")) {
      const [first, ...others] = row.cells;
      for (const cell of others) {
        cell.classList.toggle("blank", !cell.textContent.trim());
        if (others.length > 1) cell.dataset.title = titles[cell.cellIndex];
      }
      const isTitle = others.every((cell) => cell.classList.contains("blank"));
      row.classList.toggle("title", isTitle);
    }
    for (const code of table.querySelectorAll("td code .pre")) {
      const parts = code.textContent.split(/(?<=[({,=_]|[a-z]\.)(?=["\w])/);
      const breaks = parts.flatMap((part) => [document.createElement("wbr"), part]);
      code.replaceChildren(...breaks.slice(1));
    }
  }
});
