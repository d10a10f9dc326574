// Marks what jls.css needs to know about a table. On a phone the cells of a row stand one
// below the other; with three columns or more each then needs the title of its column.
// Code in a table may break after a bracket, comma, dot, underscore or equals sign, rather
// than anywhere.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const titles = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
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
