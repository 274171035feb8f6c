// The page works without this: it adds sorting by column and a filter to tables with the class "sorts".
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    return (cell.dataset.value ?? cell.textContent).trim();
  };
  table.tHead.querySelectorAll("th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        const [m, n] = [parseFloat(x.replaceAll(",", "")), parseFloat(y.replaceAll(",", ""))];
        return Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
      });
      body.append(...(down ? rows.reverse() : rows));
    });
  });
  if (body.rows.length > 5) {
    const field = document.createElement("input");
    field.className = "filter";
    field.type = "search";
    field.placeholder = "Filter rows";
    field.setAttribute("aria-label", `Filter rows: ${table.caption ? table.caption.textContent.trim() : "table"}`);
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    table.parentElement.before(field);
  }
}
for (const link of document.querySelectorAll('a[href^="#"]')) {
  link.addEventListener("click", () => {
    const target = document.getElementById(link.hash.slice(1));
    if (target?.tagName === "DETAILS") target.open = true;
  });
}
// Whoever has no pointer scrolls wide tables with the arrow keys.
for (const box of document.querySelectorAll(".scroll")) {
  if (box.scrollWidth <= box.clientWidth) continue;
  const caption = box.querySelector("caption, svg title");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", caption ? caption.textContent.trim() : "wide content");
}
