"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const narrow = matchMedia("(max-width: 700px)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const views = {};      // figure name -> Vega view, once drawn
let picked = [];       // names of the cells selected in any figure or in the table

// Tables travel by column; Vega wants rows.
function rows(table) {
  const lists = Object.entries(table).map(([name, column]) =>
    [name, Array.isArray(column) ? column : column.codes.map((code) => column.values[code])]);
  const length = lists.length ? lists[0][1].length : 0;
  return Array.from({ length }, (_, i) => Object.fromEntries(lists.map(([name, list]) => [name, list[i]])));
}
const tables = {};
const dataset = (key) => (tables[key] ??= rows(data.datasets[key]));

// ---------------------------------------------------------------- charts

const layoutName = () => (narrow.matches ? "column" : "wide");

function specFor(name) {
  const { spec, datasets } = data.figures[name][layoutName()];
  const full = structuredClone(spec);
  full.datasets = Object.fromEntries(Object.entries(datasets).map(([n, key]) => [n, dataset(key)]));
  if (dark.matches && !matchMedia("print").matches) {
    for (const [key, value] of Object.entries(data.dark)) {
      full.config[key] = typeof value === "object" ? { ...full.config[key], ...value } : value;
    }
  }
  return full;
}

async function draw(name) {
  const element = document.querySelector(`[data-figure="${name}"]`);
  const options = { renderer: "svg", actions: { export: true, source: false, compiled: false, editor: false } };
  const { view } = await vegaEmbed(element, specFor(name), options);
  views[name] = view;
  // Figures are laid out for a paper's column; here they grow with the page.
  const svg = element.querySelector("svg.marks");
  svg.style.width = `${Math.min(100, (100 * svg.width.baseVal.value) / data.widths[layoutName()])}%`;
  if ("pick" in (view.getState().signals ?? {})) {
    view.addSignalListener("pick", (_, value) => pick(value.cell ?? [], name));
  }
}

let drawing = 0;
async function drawAll() {
  const mine = ++drawing;
  document.body.dataset.drawn = "";
  for (const name of Object.keys(data.figures)) {
    if (mine !== drawing) return;      // the window changed again: a later call draws
    views[name]?.finalize();
    await draw(name);
  }
  pick(picked);
  document.body.dataset.drawn = "yes";
}

// One selection for the whole page: figures that show chosen cells have a parameter `chosen`.
function pick(cells) {
  picked = cells;
  for (const view of Object.values(views)) {
    if ("chosen" in (view.getState().signals ?? {})) view.signal("chosen", cells).runAsync();
  }
  markRows();
}

narrow.addEventListener("change", drawAll);
dark.addEventListener("change", drawAll);

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
  const name = row.dataset.cell;
  pick(picked.includes(name) ? picked.filter((cell) => cell !== name) : [...picked, name]);
};
filter.oninput = fillTable;
more.onclick = () => { all = true; fillTable(); };
addEventListener("beforeprint", () => { all = true; fillTable(); });

fillTable();
drawAll();
