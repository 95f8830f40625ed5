// ---------------------------------------------------------------- table of cells

const cells = rows(data.cells);
const columns = Object.keys(data.cells);
const FIRST = 100;     // rows drawn before "show all"
const table = document.getElementById("cell-table");
const filter = document.getElementById("filter");
const more = document.getElementById("more");
let all = false;
let order = { column: null, sign: 1 };

function text(value) {
  if (value === null) return "–";
  if (typeof value !== "number" || Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

for (const cell of cells) {
  cell.words = columns.map((name) => text(cell[name])).join(" ").toLowerCase();
}

function matching() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = cells.filter((cell) => words.every((word) => cell.words.includes(word)));
  if (order.column) {
    const value = (cell) => cell[order.column];
    found.sort((a, b) => {
      if (value(a) === null || value(b) === null) return (value(a) === null) - (value(b) === null);
      return order.sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0);
    });
  }
  return found;
}

function fillTable() {
  const found = matching();
  const shown = all ? found : found.slice(0, FIRST);
  const body = document.createElement("tbody");
  for (const cell of shown) {
    const row = body.insertRow();
    row.dataset.cell = cell.cell;
    for (const name of columns) {
      const td = row.insertCell();
      td.textContent = text(cell[name]);
      if (typeof cell[name] === "string") td.className = "text";
    }
  }
  table.tBodies[0].replaceWith(body);
  document.getElementById("shown").value = `${found.length} of ${cells.length} cells`;
  more.hidden = shown.length === found.length;
  markRows();
}

function markRows() {
  const chosen = new Set(picked);
  for (const row of table.tBodies[0].rows) row.classList.toggle("picked", chosen.has(row.dataset.cell));
}

const head = table.tHead.insertRow();
for (const name of columns) {
  const th = document.createElement("th");
  th.textContent = name;
  if (cells.some((cell) => typeof cell[name] === "string")) th.className = "text";
  th.onclick = () => {
    order = { column: name, sign: order.column === name ? -order.sign : 1 };
    fillTable();
  };
  head.append(th);
}
table.onclick = (event) => {
  const row = event.target.closest("tbody tr");
  if (!row) return;
  pick(toggled(row.dataset.cell));
};
filter.oninput = fillTable;
more.onclick = () => { all = true; fillTable(); };
addEventListener("beforeprint", () => { all = true; fillTable(); });

// ---------------------------------------------------------------- what is chosen

const bar = document.getElementById("chosen");
function showChosen() {
  bar.hidden = picked.length === 0;
  const found = new Set(picked);
  const first = cells.find((cell) => found.has(cell.cell));
  if (!first) return;
  const why = first.reason ? `, ${first.reason}` : "";
  bar.querySelector("output").value = picked.length > 1 ? `${picked.length} cells chosen`
    : `${first.cell}: ${first.state}${why}; step ${text(first.step)}, loss ${text(first.loss)}`;
}
bar.querySelector("button").onclick = () => pick([]);

addEventListener("picked", markRows);
addEventListener("picked", showChosen);
fillTable();
