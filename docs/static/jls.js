// Tells jls.css which tables are shown as cards, one for each row: a table that is wider than
// its place, and on a phone one with long cells. Each cell of a card then needs the title of
// its column, unless there are only two.
// Code and titles in a table may break after a bracket, comma, dot, underscore or equals
// sign, rather than anywhere.
document.addEventListener("DOMContentLoaded", () => {
  const tables = document.querySelectorAll("article table.docutils");
  const phone = matchMedia("(max-width: 46em)");

  function prepare(table) {
    const titles = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
    const cells = [...table.querySelectorAll("td:not(:first-child)")];
    const isLong = cells.some((cell) => cell.textContent.length > 40);
    table.classList.toggle("short", !isLong);
    for (const row of table.querySelectorAll("tbody tr")) {
      const [, ...others] = row.cells;
      for (const cell of others) {
        cell.classList.toggle("blank", !cell.textContent.trim());
        if (titles.length > 2) cell.dataset.title = titles[cell.cellIndex];
      }
      const isTitle = others.every((cell) => cell.classList.contains("blank"));
      row.classList.toggle("title", isTitle);
    }
    for (const code of table.querySelectorAll("code .pre, th p:not(:has(*))")) {
      const parts = code.textContent.split(/(?<=[({,=_]|[a-z]\.)(?=["\w])/);
      const breaks = parts.flatMap((part) => [document.createElement("wbr"), part]);
      code.replaceChildren(...breaks.slice(1));
    }
  }

  function fit(table) {
    table.classList.remove("cards");
    const place = table.parentElement;
    const isTooWide = place.scrollWidth > place.clientWidth;
    const isLong = !table.classList.contains("short") && table.tHead;
    table.classList.toggle("cards", isTooWide || (phone.matches && isLong));
  }

  tables.forEach(prepare);
  tables.forEach(fit);
  addEventListener("resize", () => tables.forEach(fit));
});
