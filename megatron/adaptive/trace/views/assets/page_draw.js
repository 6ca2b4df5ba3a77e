"use strict";
// Converts the visible part of a block into a few plotly traces, each with many bars.

// Limits on the number of items that are drawn at a time.
const LIMITS = {
  bars: 9000,       // if there are more, shares of time are drawn instead
  outlined: 2500,
  labels: 900,
  arrows: 300,
  memoryNames: 8,   // maximum number of memory curves in the legend
};
const BAR = 0.4;             // half the height of a row

// Vertical range of bars within a row, measured downwards from the row's middle.
function heights(withSimulated) {
  return withSimulated
    ? { top: -BAR, foot: 0.12, ghostTop: 0.17, ghostFoot: BAR }
    : { top: -BAR, foot: BAR, ghostTop: 0, ghostFoot: 0 };
}

class Bars {
  constructor() { this.x = []; this.y = []; }

  add(from, to, top, foot) {
    this.x.push(from, to, to, from, from, null);
    this.y.push(top, top, foot, foot, top, null);
  }
}

function barTrace(bars, category, outlined, more) {
  return {
    type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip",
    x: bars.x, y: bars.y, name: category.name, fillcolor: category.color,
    line: { width: outlined ? 0.7 : 0, color: outlined ? "#ffffff" : category.color },
    ...more,
  };
}

// Returns traces of the bars of a view: from, to (ms), top, foot (rows), width (pixels).
function timelineTraces(block, view, options) {
  const place = heights(options.simulated && block.simulated_ms > 0);
  const per = CATEGORIES.map(() => new Bars());
  const labels = { x: [], y: [], text: [], color: [] };
  const ranges = [];
  let total = 0;
  for (let row = view.top; row <= view.foot; row++) {
    const range = barsWithin(block, row, view.from, view.to);
    ranges.push([row, ...range]);
    total += range[1] - range[0];
  }
  const summed = total > LIMITS.bars;
  if (summed) {
    for (const [row, low, high] of ranges) {
      addShares(per, sharesOf(block, view, low, high), row, view, place);
    }
  } else {
    for (const [row, low, high] of ranges) addBars(per, labels, block, view, row, low, high, place);
  }
  const traces = CATEGORIES.map((category, i) => barTrace(per[i], category,
    !summed && total <= LIMITS.outlined, legendOf(category, block.present[i])));
  return { traces, labels, summed, total };
}

function legendOf(category, present) {
  return { showlegend: Boolean(present) && category.in_legend, visible: present ? true : false };
}

function addBars(per, labels, block, view, row, low, high, place) {
  const unit = block.unit_ms;
  const perMs = view.width / (view.to - view.from);
  for (let i = low; i < high; i++) {
    const category = CATEGORIES[block.category[i]];
    const from = block.start[i] * unit;
    const to = from + block.length[i] * unit;
    let [top, foot] = [row + place.top, row + place.foot];
    // Data is read during an action, so it is drawn as a strip at the bottom of the action.
    if (category.kind === "data") top = foot - 0.13 * (place.foot - place.top);
    if (category.kind === "wait") [top, foot] = [top + 0.1, foot - 0.1];
    per[block.category[i]].add(from, Math.max(to, from + 0.6 / perMs), top, foot);
    const shown = (Math.min(to, view.to) - Math.max(from, view.from)) * perMs;
    if (category.chunk < 0 || labels.x.length >= LIMITS.labels) continue;
    const text = itemText(category.kind, block.microbatch[i], block.slices);
    if (shown > 7 * text.length + 5) {
      labels.x.push((Math.max(from, view.from) + Math.min(to, view.to)) / 2);
      labels.y.push((top + foot) / 2);
      labels.text.push(text);
      labels.color.push(category.ink);
    }
  }
}

// Returns the share of each pixel column that a row spent on each category: [category][column].
function sharesOf(block, view, low, high) {
  const columns = Math.max(40, Math.round(view.width / (view.foot - view.top > 40 ? 4 : 2)));
  const shares = CATEGORIES.map(() => null);
  const perUnit = block.unit_ms * columns / (view.to - view.from);
  const shift = view.from * columns / (view.to - view.from);
  for (let i = low; i < high; i++) {
    const number = block.category[i];
    if (CATEGORIES[number].kind === "data") continue;  // is part of an action
    const from = Math.max(0, block.start[i] * perUnit - shift);
    const to = Math.min(columns, (block.start[i] + block.length[i]) * perUnit - shift);
    if (!(to > from)) continue;
    const mine = shares[number] || (shares[number] = new Float32Array(columns));
    for (let at = Math.floor(from); at < to; at++) {
      mine[at] += Math.min(at + 1, to) - Math.max(at, from);
    }
  }
  return { shares, columns };
}

// Stacks shares as bars; adjacent columns with the same share become one bar.
function addShares(per, found, row, view, place) {
  const { shares, columns } = found;
  const step = (view.to - view.from) / columns;
  const height = place.foot - place.top;
  const base = new Float32Array(columns).fill(row + place.foot);
  shares.forEach((mine, number) => {
    if (!mine) return;
    for (let at = 0; at < columns;) {
      const share = Math.min(1, mine[at]);
      let behind = at + 1;
      while (behind < columns && Math.abs(mine[behind] - share) < 0.01 &&
             Math.abs(base[behind] - base[at]) < 0.01) behind++;
      const foot = base[at];
      const top = Math.max(row + place.top, foot - share * height);
      if (share > 0.004) {
        per[number].add(view.from + at * step, view.from + behind * step, top, foot);
      }
      for (; at < behind; at++) base[at] = top;
    }
  });
}

function simulatedTraces(block, view, options, labels) {
  const shown = options.simulated && block.simulated_ms > 0;
  const place = { top: heights(true).ghostTop, foot: heights(true).ghostFoot };
  const per = CATEGORIES.map(() => new Bars());
  let total = 0;
  for (let row = view.top; shown && row <= view.foot; row++) {
    const [low, high] = barsWithin(block.ideal, row, view.from, view.to);
    total += high - low;
    addBars(per, labels, block.ideal, view, row, low, high, place);
  }
  const actions = CATEGORIES.map((_, i) => i).filter((i) => CATEGORIES[i].chunk >= 0);
  return actions.map((i, at) => barTrace(per[i], CATEGORIES[i], total <= LIMITS.outlined / 2, {
    name: "no rank slower (lower bars)", legendgroup: "simulated", opacity: 0.5,
    showlegend: shown && at === 0, visible: shown,
  }));
}

function idleTrace(block, view, color) {
  const bars = new Bars();
  for (let row = view.top; row <= view.foot; row++) {
    bars.add(0, block.step_ms, row - BAR, row + BAR);
  }
  return barTrace(bars, { name: "idle", color }, false, { legendrank: 2000 });
}

function labelTrace(labels) {
  return {
    type: "scatter", mode: "text", hoverinfo: "skip", showlegend: false,
    x: labels.x, y: labels.y, text: labels.text,
    textfont: { size: 10.5, color: labels.color },
  };
}

// Returns the arrows of the visible messages and their number. If there are too many messages,
// there are no arrows.
function arrowTrace(block, view, options) {
  const [x, y, size] = [[], [], []];
  const unit = block.unit_ms;
  const place = heights(options.simulated && block.simulated_ms > 0);
  const middle = (place.top + place.foot) / 2;
  const end = lowerBound(block.sent, view.to / unit, 0, block.sent.length);
  let inView = 0;
  for (let i = 0; options.arrows && i < end; i++) {
    if (block.arrived[i] * unit < view.from) continue;
    const rows = [block.source[i], block.target[i]];
    if (Math.max(...rows) < view.top || Math.min(...rows) > view.foot) continue;
    inView += 1;
    if (inView > LIMITS.arrows) continue;
    const down = rows[1] > rows[0] ? 0.3 : -0.3;
    x.push(block.sent[i] * unit, block.arrived[i] * unit, null);
    y.push(rows[0] + middle + down * 0.5, rows[1] + middle - down, null);
    size.push(0, 8, 0);
  }
  const shown = inView <= LIMITS.arrows;
  return {
    inView,
    trace: {
      type: "scatter", mode: "lines+markers", hoverinfo: "skip", name: "message",
      x: shown ? x : [], y: shown ? y : [], showlegend: options.arrows && block.sent.length > 0,
      line: { width: 0.9, color: "rgba(31,35,40,0.55)" },
      marker: { symbol: "arrow", angleref: "previous", size: shown ? size : 0,
        color: "rgba(31,35,40,0.75)", line: { width: 0 } },
    },
  };
}

// Returns the activation bytes of every row over time, with at most a few points per pixel.
function memoryTraces(block, group, view, options) {
  const names = PAGE.groups[group].rows;
  const unit = block.unit_ms;
  return names.map((name, row) => {
    const [x, y] = [[], []];
    const [low, high] = barsWithin(block, row, view.from, view.to);
    const step = Math.max(1, Math.floor((high - low) / 4000));
    let most = 0;
    let first = low;  // the last action before the view gives the bytes at its start
    const isAction = (bar) => CATEGORIES[block.category[bar]].chunk >= 0;
    while (first > block.offset[row] && (first === low || !isAction(first))) first--;
    for (let i = first; options.memory && i < high; i++) {
      if (!isAction(i)) continue;
      most = Math.max(most, block.in_flight_bytes[i]);
      if ((i - first) % step) continue;
      x.push(block.start[i] * unit);
      y.push(most / 2 ** 20);
      most = 0;
    }
    if (x.length) {
      x.push(Math.max(x[x.length - 1], Math.min(view.to, block.step_ms)));
      y.push(y[y.length - 1]);
    }
    return {
      type: "scatter", mode: "lines", x, y, name, yaxis: "y2", legend: "legend2",
      line: { shape: "hv", width: 1.4, color: rowColor(row, names.length) },
      hovertemplate: "%{y:.4~g} MiB at %{x:.3f} ms<extra>%{fullData.name}</extra>",
      showlegend: options.memory && names.length <= LIMITS.memoryNames, visible: options.memory,
    };
  });
}

function rowColor(row, rows) {
  const part = rows > 1 ? row / (rows - 1) : 0;
  return `hsl(${Math.round(262 - 232 * part)} 62% ${Math.round(46 + 6 * part)}%)`;
}
