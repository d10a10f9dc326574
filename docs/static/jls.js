// On a phone the rows of a table stand one below the other (jls.css): each cell then
// needs the title of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const titles = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.cells].forEach((cell, i) => {
        cell.dataset.title = titles[i] ?? "";
      });
    }
  }
});
