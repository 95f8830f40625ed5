"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const narrow = matchMedia("screen and (max-width: 700px)");
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const views = {};      // figure name -> Vega view, once drawn
let picked = [];       // names of the cells selected in any figure or in the table

// Tables travel by column; Vega wants rows.
function list(column) {
  if (Array.isArray(column)) return column;
  const values = data.values[column.values];
  return column.codes ? column.codes.map((code) => values[code]) : values;
}
function rows(table) {
  const lists = Object.entries(table).map(([name, column]) => [name, list(column)]);
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
  if (dark.matches) {
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
  view.addEventListener("click", (event, item) => {
    const cell = item?.datum?.cell;
    if (cell) pick(event.shiftKey ? toggled(cell) : picked.length === 1 && picked[0] === cell ? [] : [cell]);
  });
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

// One selection for the whole page: figures that show cells have a parameter `chosen`.
const toggled = (cell) => picked.includes(cell) ? picked.filter((other) => other !== cell) : [...picked, cell];
function pick(cells) {
  picked = cells;
  for (const view of Object.values(views)) {
    if ("chosen" in (view.getState().signals ?? {})) view.signal("chosen", cells).runAsync();
  }
  dispatchEvent(new Event("picked"));
}

addEventListener("keydown", (event) => { if (event.key === "Escape") pick([]); });
narrow.addEventListener("change", drawAll);
dark.addEventListener("change", drawAll);

drawAll();
