"use strict";
// Reads the blocks of the page and finds bars by row and time. Times are milliseconds.

const PAGE = JSON.parse(document.getElementById("page").textContent);
const ARRAYS = { int32: Int32Array, float64: Float64Array };
const CATEGORIES = PAGE.categories;

const blocks = new Map();

function loadBlock(group, place) {
  const name = `block-${group}-${place}`;
  if (!blocks.has(name)) {
    blocks.set(name, decodeBlock(JSON.parse(document.getElementById(name).textContent)));
  }
  return blocks.get(name);
}

async function decodeBlock(block) {
  const packed = Uint8Array.from(atob(block.data), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  let at = 0;
  for (const [name, type, length] of block.columns) {
    block[name] = new ARRAYS[type](buffer, at, length);
    at += block[name].byteLength;
  }
  delete block.data;
  // Columns of the ideal step, in which no rank is slower than others, have a prefix.
  block.ideal = { isIdeal: true, unit_ms: block.unit_ms, slices: block.slices };
  for (const [name] of block.columns.filter(([name]) => name.startsWith("s_"))) {
    block.ideal[name.slice(2)] = block[name];
  }
  block.reach = reachOf(block);
  block.ideal.reach = reachOf(block.ideal);
  block.rows = block.offset.length - 1;
  return block;
}

// Latest end of each bar and of the bars before it in its row. A search for bars that are open at
// some time begins there.
function reachOf(block) {
  const reach = new Float64Array(block.start.length);
  for (let row = 0; row + 1 < block.offset.length; row++) {
    let latest = -Infinity;
    for (let i = block.offset[row]; i < block.offset[row + 1]; i++) {
      latest = Math.max(latest, block.start[i] + block.length[i]);
      reach[i] = latest;
    }
  }
  return reach;
}

// Returns the first index in [low, high) of an ascending array whose value is at least `value`.
function lowerBound(array, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (array[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

// Returns the bars of a row that touch a time range, as [first, last + 1).
function barsWithin(block, row, from, to) {
  const [low, high] = [block.offset[row], block.offset[row + 1]];
  const [a, b] = [from / block.unit_ms, to / block.unit_ms];
  return [lowerBound(block.reach, a, low, high), lowerBound(block.start, b, low, high)];
}

// Returns the bar of a row at a time, or the nearest bar within `slack`, or -1 if there is none.
function barAt(block, row, time, slack) {
  const [low, high] = barsWithin(block, row, time - slack, time + slack);
  const unit = block.unit_ms;
  let best = -1;
  let least = Infinity;
  for (let i = high - 1; i >= low && high - i < 4000; i--) {
    const category = CATEGORIES[block.category[i]];
    const [start, end] = [block.start[i] * unit, (block.start[i] + block.length[i]) * unit];
    const away = Math.max(0, start - time, time - end);
    const idle = category.kind === "wait" ? 1e-9 : 0;
    if (away <= slack && away + idle + (end - start) * 1e-12 < least) {
      least = away + idle + (end - start) * 1e-12;
      best = i;
    }
  }
  return best;
}

// Returns the wait that ended when an action began, or -1 if there is none.
function waitBefore(block, row, bar) {
  const action = CATEGORIES[block.category[bar]];
  const kind = PAGE.kinds.indexOf(action.kind);
  for (let i = bar - 1; i >= block.offset[row] && bar - i < 6; i--) {
    if (CATEGORIES[block.category[i]].kind === "wait" && block.of[i] === kind &&
        block.microbatch[i] === block.microbatch[bar] && block.chunk[i] === block.chunk[bar] &&
        block.piece[i] === block.piece[bar]) {
      return i;
    }
  }
  return -1;
}

function formatMs(value) {
  const size = Math.abs(value);
  const digits = size >= 1000 ? 1 : size >= 100 ? 2 : size >= 1 ? 3 : 4;
  return `${value.toFixed(digits)} ms`;
}

function formatBytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${place ? value.toFixed(value >= 100 ? 0 : 1) : value} ${units[place]}`;
}

const WORDS = { F: "forward", B: "backward", W: "weight gradient" };

// Returns a microbatch as text: 3, or 3.5 for slice 5 of microbatch 3. `slices` is the number of
// slices of each microbatch, or a list with a number for each microbatch.
function itemText(kind, microbatch, slices) {
  if (kind === "data" || slices === 1) return `${microbatch}`;
  if (!Array.isArray(slices)) {
    return `${Math.floor(microbatch / slices)}.${microbatch % slices}`;
  }
  let part = microbatch;
  for (let whole = 0; whole < slices.length; whole++) {
    if (part < slices[whole]) return `${whole}.${part}`;
    part -= slices[whole];
  }
  return `${microbatch}`;
}

function nameOf(kind, chunk, microbatch, piece, slices) {
  let text = WORDS[kind] || kind;
  if (microbatch >= 0) text += ` of microbatch ${itemText(kind, microbatch, slices)}`;
  if (chunk >= 0) text += `, chunk ${chunk}`;
  return piece > 0 ? `${text}, piece ${piece}` : text;
}

// Returns the label of a bar, with its colour, a title, and pairs of name and value.
function describeBar(block, group, row, bar) {
  const category = CATEGORIES[block.category[bar]];
  const lines = [["row", PAGE.groups[group].rows[row]]];
  const unit = block.unit_ms;
  lines.push(["start", formatMs(block.start[bar] * unit)]);
  lines.push(["length", formatMs(block.length[bar] * unit)]);
  const [chunk, microbatch] = [block.chunk[bar], block.microbatch[bar]];
  let title = nameOf(category.kind, chunk, microbatch, block.piece[bar], block.slices);
  if (block.isIdeal) return { color: category.color, title: `ideal ${title}`, lines };
  if (category.kind === "wait") {
    title = category.name;
    if (block.of[bar] >= 0) {
      const kind = PAGE.kinds[block.of[bar]];
      lines.push(["ended by", nameOf(kind, chunk, microbatch, 0, block.slices)]);
    }
    if (block.peer[bar] >= 0) lines.push(["input from", `rank ${block.peer[bar]}`]);
  } else if (WORDS[category.kind]) {
    const wait = waitBefore(block, row, bar);
    if (wait >= 0) {
      const cause = CATEGORIES[block.category[wait]].name;
      lines.push(["waited", `${formatMs(block.length[wait] * unit)}: ${cause}`]);
    } else {
      lines.push(["waited", "not at all"]);
    }
    const reason = PAGE.reasons[block.reason[bar]];
    if (reason) lines.push(["picked as", reason]);
    lines.push(["bytes", formatBytes(block.bytes[bar])]);
    lines.push(["held", formatBytes(block.in_flight_bytes[bar])]);
    lines.push(["inputs queued", `${block.queue_depth[bar]}`]);
  } else if (block.bytes[bar]) {
    lines.push(["bytes", formatBytes(block.bytes[bar])]);
  }
  return { color: category.color, title, lines };
}
