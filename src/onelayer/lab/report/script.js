// Headers become buttons here and not in the page: without JavaScript a button would do nothing.
"use strict";
const text = new Intl.Collator("en", {numeric: true});
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const order = (a, b) => (a - b) || text.compare(a, b);
      body.append(...[...body.rows].sort((a, b) => sign * order(value(a), value(b))));
    });
  });
}
