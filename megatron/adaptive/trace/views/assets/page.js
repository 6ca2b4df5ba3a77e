"use strict";
// Holds the state of the page and handles its controls.

const chart = document.getElementById("chart");
const tip = document.getElementById("tip");
const element = (id) => document.getElementById(id);
const CONFIG = {
  responsive: true, displaylogo: false, scrollZoom: true,
  showSendToCloud: false, plotlyServerURL: "",  // the page sends no data
  doubleClick: "autosize",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "resetScale2d"],
  modeBarButtonsToAdd: [
    { name: "whole", title: "Whole step", icon: Plotly.Icons.home, click: () => showAll() },
  ],
};
const SWITCHES = ["arrows", "simulated", "memory"];
const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const state = { place: 0, group: 0, block: null, from: null, to: null, rows: null, draws: 0 };

function options() {
  return {
    arrows: element("arrows").checked,
    simulated: element("simulated").checked,
    memory: element("memory").checked,
  };
}

// Returns the visible range. Without zoom, it begins shortly before the step and ends with it.
function currentView() {
  const block = state.block;
  const names = PAGE.groups[state.group].rows;
  const whole = Math.max(block.shown_ms, block.simulated_ms) || block.extent_ms;
  const from = state.from === null ? -0.01 * whole : state.from;
  const to = state.to === null ? 1.01 * whole : state.to;
  const rows = state.rows || [names.length - 0.5, -0.5];
  const limit = (row) => Math.min(names.length - 1, Math.max(0, Math.round(row)));
  const margins = 160;
  return {
    from, to, rows, width: Math.max(200, chart.clientWidth - margins),
    top: limit(Math.min(...rows)), foot: limit(Math.max(...rows)),
  };
}

function makeTraces(view) {
  const [block, chosen] = [state.block, options()];
  const idle = idleTrace(block, view, PAGE.idle);
  const bars = timelineTraces(block, view, chosen);
  const arrows = arrowTrace(block, view, chosen);
  const said = [];
  if (bars.summed) {
    said.push(`${bars.total.toLocaleString("en")} spans in view: shown as parts of time`);
  }
  if (arrows.inView > LIMITS.arrows) {
    said.push(`${arrows.inView.toLocaleString("en")} messages in view: zoom in for arrows`);
  }
  if (chosen.simulated && !block.simulated_ms) said.push("there is no ideal step for this iteration");
  element("message").textContent = said.join("; ");
  return [
    idle, ...bars.traces, ...simulatedTraces(block, view, chosen, bars.labels), arrows.trace,
    labelTrace(bars.labels), ...memoryTraces(block, state.group, view, chosen),
  ];
}

function makeLayout(view) {
  const names = PAGE.groups[state.group].rows;
  const memory = options().memory;
  const every = Math.ceil((view.foot - view.top + 1) / 40);
  const ticks = names.map((_, row) => row).filter((row) =>
    row >= view.top && row <= view.foot && (row - view.top) % every === 0);
  const longest = Math.max(...names.map((name) => name.length));
  const floor = memory ? 0.32 : 0;
  const legend = { orientation: "h", x: 0, yanchor: "bottom" };
  const grid = { gridcolor: "#ececef", zeroline: false };
  return {
    uirevision: "page", margin: { l: Math.min(220, 30 + 6.6 * longest), r: 20, t: 58, b: 44 },
    hovermode: "closest", dragmode: "zoom", plot_bgcolor: "#fff", paper_bgcolor: "#fff",
    font: { family: FONT, size: 12, color: "#1f2328" },
    legend: { ...legend, y: 1.005, traceorder: "normal", font: { size: 11.5 } },
    legend2: { ...legend, y: memory ? 0.235 : 0, font: { size: 11 },
      title: { text: "activation memory held by " } },
    xaxis: { ...grid, range: [view.from, view.to], anchor: memory ? "y2" : "y",
      title: { text: "time in the step (ms)", standoff: 6 }, uirevision: `x${++state.draws}` },
    yaxis: { showgrid: false, zeroline: false, range: view.rows, domain: [floor, 1],
      tickvals: ticks, ticktext: ticks.map((row) => names[row]), fixedrange: names.length <= 12,
      uirevision: `y${state.draws}` },
    yaxis2: { ...grid, domain: [0, 0.23], title: { text: "MiB", standoff: 4 }, visible: memory,
      rangemode: "tozero", fixedrange: true, uirevision: `m${state.draws}` },
  };
}

function draw() {
  const view = currentView();
  const block = state.block;
  const number = PAGE.iterations[state.place];
  element("iteration").textContent = `iteration ${number}`;
  element("slider").value = state.place;
  element("group").value = state.group;
  element("numbers").innerHTML = `step <b>${formatMs(block.step_ms)}</b>, bubble ` +
    `<b>${(100 * block.bubble).toFixed(1)}%</b>` +
    (block.simulated_ms ? `, no rank slower <b>${formatMs(block.simulated_ms)}</b>` : "");
  chart.dataset.iteration = number;
  return Plotly.react(chart, makeTraces(view), makeLayout(view), CONFIG);
}

let pending = false;
function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; draw(); });
}

async function show(place, group) {
  state.place = Math.max(0, Math.min(PAGE.iterations.length - 1, place));
  if (group !== state.group) [state.from, state.to, state.rows] = [null, null, null];
  state.group = group;
  const wanted = [state.group, state.place];
  const block = await loadBlock(...wanted);
  if (wanted[0] !== state.group || wanted[1] !== state.place) return;  // the slider was moved again
  if (!block.present) {
    const found = new Set(block.category);
    block.present = CATEGORIES.map((_, number) => found.has(number));
  }
  state.block = block;
  await draw();
}

function showAll() {
  [state.from, state.to, state.rows] = [null, null, null];
  element("node").selectedIndex = 0;
  redraw();
}

// Shows the rows of the chosen node, or all rows.
function showNode() {
  const rows = Object.values(PAGE.nodes)[element("node").selectedIndex - 1];
  state.rows = rows ? [rows[rows.length - 1] + 0.5, rows[0] - 0.5] : null;
  redraw();
}

// Updates the zoom of the chart from a change that plotly reports.
function zoomed(change) {
  if (change["xaxis.autorange"]) [state.from, state.to] = [null, null];
  if ("xaxis.range[0]" in change) {
    [state.from, state.to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  } else if (change["xaxis.range"]) {
    [state.from, state.to] = change["xaxis.range"];
  }
  if (change["yaxis.autorange"]) state.rows = null;
  if ("yaxis.range[0]" in change) state.rows = [change["yaxis.range[0]"], change["yaxis.range[1]"]];
  redraw();
}

function showTip(event) {
  const layout = chart._fullLayout;
  const block = state.block;
  tip.hidden = true;
  if (!layout || !block || event.buttons) return;
  const box = chart.getBoundingClientRect();
  const [x, y] = [layout.xaxis, layout.yaxis];
  const [atX, atY] = [event.clientX - box.left - x._offset, event.clientY - box.top - y._offset];
  if (atX < 0 || atX > x._length || atY < 0 || atY > y._length) return;
  const [time, height] = [x.p2d(atX), y.p2d(atY)];
  const row = Math.round(height);
  const within = height - row;
  const withSimulated = options().simulated && block.simulated_ms > 0;
  const place = heights(withSimulated);
  if (row < 0 || row >= block.rows || Math.abs(within) > BAR) return;
  const slack = 2.5 * (x.p2d(1) - x.p2d(0));
  const part = within <= place.foot ? block : within >= place.ghostTop ? block.ideal : null;
  const bar = part ? barAt(part, row, time, slack) : -1;
  if (bar >= 0) fillTip(describeBar(part, state.group, row, bar), event);
}

function fillTip(described, event) {
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const cells = described.lines.map(([name, value]) =>
    `<tr><td>${safe(name)}</td><td>${safe(value)}</td></tr>`);
  tip.innerHTML = `<b><i style="background:${described.color}"></i>${safe(described.title)}</b>` +
    `<table>${cells.join("")}</table>`;
  tip.hidden = false;
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
  const below = event.clientY + 18;
  tip.style.top = `${below + height > innerHeight ? event.clientY - height - 12 : below}px`;
}

async function begin() {
  element("title").textContent = PAGE.title;
  element("subtitle").textContent = PAGE.subtitle;
  const notes = element("notes");
  for (const line of PAGE.notes) notes.appendChild(document.createElement("p")).textContent = line;
  const select = element("group");
  PAGE.groups.forEach((group, i) => select.add(new Option(group.name, i)));
  select.hidden = PAGE.groups.length < 2;
  const nodes = element("node");
  const names = Object.keys(PAGE.nodes);
  for (const name of ["all nodes", ...names]) nodes.add(new Option(name));
  nodes.hidden = !names.length;
  nodes.addEventListener("change", showNode);
  element("slider").max = PAGE.iterations.length - 1;
  for (const id of ["slider", "previous", "next"]) element(id).hidden = PAGE.iterations.length < 2;
  const height = Math.min(1100, Math.max(400, 220 + 18 * PAGE.groups[0].rows.length));
  chart.style.minHeight = `${height}px`;
  // Drawing a curve for each of very many rows is slow.
  if (PAGE.groups[0].rows.length > 64) element("memory").checked = false;
  await show(PAGE.iterations.length - 1, 0);
  chart.on("plotly_relayout", zoomed);
  chart.addEventListener("mousemove", showTip);
  chart.addEventListener("mouseleave", () => { tip.hidden = true; });
  const move = (by) => show(state.place + by, state.group);
  element("slider").addEventListener("input", () =>
    show(Number(element("slider").value), state.group));
  element("previous").addEventListener("click", () => move(-1));
  element("next").addEventListener("click", () => move(1));
  select.addEventListener("change", () => show(state.place, Number(select.value)));
  for (const id of SWITCHES) element(id).addEventListener("change", redraw);
  document.addEventListener("keydown", (event) => {
    if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
    if (event.key === "ArrowLeft") move(-1);
    if (event.key === "ArrowRight") move(1);
  });
  document.body.dataset.ready = "yes";
}

begin();
