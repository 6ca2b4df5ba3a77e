"use strict";
const DATA = JSON.parse(document.getElementById("report-data").textContent);
const at = (id) => document.getElementById(id);
const MANY_RANKS = 16, CONFIG = { responsive: true, displaylogo: false };

function element(parent, name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

function table(id, heads, rows, empty) {
  if (!rows.length) return void at(id).replaceWith(element(document.body, "p", empty, "none"));
  const head = element(at(id), "tr");
  for (const text of heads) element(head, "th", text);
  for (const [kind, ...cells] of rows) {
    const row = element(at(id), "tr", undefined, kind);
    cells.forEach((text, place) => element(row, "td", text, place < 2 ? "word" : ""));
  }
}

function layout(x, y, more) {
  return { height: 260, margin: { l: 64, r: 12, t: 30, b: 40 }, hovermode: "closest",
    xaxis: { title: { text: x } }, yaxis: { title: { text: y }, rangemode: "tozero" },
    showlegend: true, legend: { orientation: "h", y: 1.12 }, ...more };
}

function draw(id, traces, shape, empty) {
  if (!traces.some((trace) => (trace.x || trace.z || []).some((value) => value !== null))) {
    return void element(at(id), "p", empty, "none");
  }
  Plotly.newPlot(at(id), traces, shape, CONFIG);
}

function line(name, x, y, more) {
  return { type: "scatter", mode: x.length > 1 ? "lines" : "markers", name, x, y, ...more };
}

function curve(id, column, name, unit, more) {
  const values = DATA.curves[column], x = DATA.curves.iteration;
  const known = values.some((value) => value !== null);
  const resumed = DATA.starts.map((place) => ({ type: "line", x0: place, x1: place, yref: "paper",
    y0: 0, y1: 1, line: { color: "#a4262c", width: 1, dash: "dot" } }));
  draw(id, known ? [line(name, x, values)] : [], layout("iteration", unit,
    { showlegend: false, shapes: resumed, ...more }), "The logs contain no data for this chart.");
}

// The first iteration after a start takes long, so ignore it for the initial height of the chart.
function usual(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  const high = known[Math.floor(0.97 * (known.length - 1))] * 1.3;
  return known[known.length - 1] > 2 * high ? { range: [0, high] } : { rangemode: "tozero" };
}

function times() {
  const traces = DATA.traces, ms = { title: { text: "ms" }, ...usual(DATA.curves.ms) };
  if (!traces) return curve("times", "ms", "iteration", "ms", { yaxis: ms });
  const x = traces.iterations;
  if (traces.ranks.length <= MANY_RANKS) {
    const drawn = traces.rank_ms.map((row, place) => line(traces.labels[place], x, row));
    drawn.push(line("as logged, including the optimizer update", DATA.curves.iteration, DATA.curves.ms,
      { line: { color: "#9a9aa0", dash: "dot" } }));
    return draw("times", drawn, layout("iteration", "ms", { yaxis: ms }), "");
  }
  draw("times", [{ type: "heatmap", x, y: traces.labels, z: traces.rank_ms, colorscale: "Viridis",
    colorbar: { title: { text: "ms" } } }], layout("iteration", "", { height:
    Math.min(900, 120 + 12 * traces.ranks.length), margin: { l: 220, r: 12, t: 8, b: 40 } }), "");
}

function use() {
  const percent = [], memory = [];
  for (const [name, node] of Object.entries(DATA.use)) {
    const when = node.unix_ms.map((ms) => new Date(ms));
    percent.push(line(`${name} processes`, when, node.cpu_percent));
    memory.push(line(`${name} processes`, when, node.gib));
    for (const [index, gpu] of Object.entries(node.gpus)) {
      percent.push(line(`${name} GPU ${index}`, when, gpu.percent));
      memory.push(line(`${name} GPU ${index}`, when, gpu.gib));
    }
  }
  const none = "No node has recorded its resource use.";
  draw("percent", percent, layout("", "% of one CPU or GPU"), none);
  draw("memory", memory, layout("", "memory, GiB"), none);
}

// The page of the traces uses the plotly.js of this page.
function pipeline() {
  const frame = element(at("pipeline"), "iframe"), code = document.querySelector("script:not([type])");
  frame.srcdoc = DATA.traces.page.replace("{{plotly}}", () => code.textContent);
}

at("title").textContent = DATA.title;
for (const [name, value] of DATA.facts) {
  element(at("facts"), "dt", name);
  element(at("facts"), "dd", value);
}
table("settings", ["variable", "requested", "effective", "meaning"], DATA.settings.map((one) =>
  [one.differs ? "differs" : "", one.name, one.requested,
    one.effective + (one.differs ? " (differs)" : ""), one.meaning]), "run.json is missing.");
{
  const rows = DATA.messages.map((one) => [one.kind, one.kind, one.node, one.text, one.count]);
  if (rows.length) table("messages", ["", "node", "line", "times"], rows);
  else at("messages").outerHTML = '<p class="none">none</p>';
}
curve("loss", "loss", "loss", "loss", { yaxis: { title: { text: "loss" } } });
curve("throughput", "tokens_per_s", "tokens/s", "tokens/s of all ranks");
times();
use();
if (DATA.traces) pipeline();
else at("pipeline").remove();
for (const note of DATA.notes) element(at("notes"), "p", note);
document.body.dataset.ready = "yes";
