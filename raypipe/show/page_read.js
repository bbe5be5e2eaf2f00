
"use strict";
// Reads what the timeline shows, and has words for times and sizes. page_data.py says what the data are; page_draw.js follows this file.

const element = (id) => document.getElementById(id);
const data = JSON.parse(element("data").textContent);
const KINDS = Object.keys(data.kinds);
const CAUSES = data.causes;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const LEAST_PIXELS = 1.5; // narrower pieces are put together
const BUCKET_PIXELS = 2;
const SEVERAL = -2;

// ---- Reading

const opsOf = (name) =>
  [...name.matchAll(/(\d+)([A-Z])(\d+)(?:\.(\d+))?(?:@(\d+))?/g)].map(([text, stage, kind, index, part, pipeline]) => ({
    text, stage: +stage, kind, index: +index, part: +(part || 0), pipeline: +(pipeline || 0),
  }));
const branchOf = (trace, stage) => data.branches[trace.branches[stage] ?? -1];
const isPerUpdate = (op) => "UGP".includes(op.kind);

function messageOf(name) {
  const found = /^([AG])(\d+)>(\d+):(\d+)(\.\d+)?$/.exec(name);
  if (!found) return { text: name.slice(1), index: -1 };
  const [, letter, source, target, index, part] = found;
  const what = letter === "A" ? "activation" : "gradient";
  return { text: `${what} ${source}\u2192${target} of microbatch ${index}${part || ""}`, index: +index };
}

const valueAt = (column, position) => (Array.isArray(column) ? column[position] : column);

// The pieces of a device: piece i lasts from time[i] to time[i + 1]. Its group is the kind of its Op, or its cause behind all
// kinds; its shade tells the stages of the device and of one branch apart.
function readRow(trace, row) {
  const tick = trace.tick_s;
  const count = row.length.length;
  const pieces = {
    count, name: row.name, time: new Float64Array(count + 1), cause: new Uint8Array(count), group: new Uint8Array(count),
    microbatch: new Int32Array(count).fill(-1), several: new Map(), shade: new Uint8Array(count), shades: 1, most: 0,
    peer: new Int32Array(count).fill(-1), bytes: new Float64Array(count),
  };
  const holders = new Map();
  let ticks = 0, idle = 0;
  for (let i = 0; i < count; i++) {
    pieces.time[i + 1] = (ticks += row.length[i]) * tick;
    pieces.cause[i] = row.cause.charCodeAt(i) - 97;
    pieces.group[i] = KINDS.length + pieces.cause[i];
    if (pieces.cause[i]) {
      pieces.peer[i] = row.peer[idle];
      pieces.bytes[i] = valueAt(row.bytes, idle++);
      pieces.microbatch[i] = messageOf(row.name[i]).index;
      continue;
    }
    const ops = opsOf(row.name[i]);
    const microbatches = new Set(ops.filter((op) => !isPerUpdate(op)).map((op) => op.index));
    pieces.most = Math.max(pieces.most, ...microbatches);
    if (microbatches.size === 1) pieces.microbatch[i] = ops[0].index;
    if (microbatches.size > 1) {
      pieces.microbatch[i] = SEVERAL;
      pieces.several.set(i, microbatches);
    }
    pieces.group[i] = KINDS.indexOf(ops[0].kind);
    const holder = `${ops[0].pipeline}/${ops[0].stage}`, side = `${ops[0].pipeline}/${trace.branches[ops[0].stage] ?? -1}`;
    if (!holders.has(holder)) holders.set(holder, { number: holders.size, side });
    pieces.shade[i] = [...holders.values()].filter((one) => one.side === side).indexOf(holders.get(holder));
  }
  pieces.shades = Math.max(...pieces.shade, 0) + 1;
  return pieces;
}

// What may overlap, by start; latest[i] is the latest end up to i, for a binary search.
function readMessages(row, tick) {
  const count = row.step.length;
  const [start, end, latest] = [0, 1, 2].map(() => new Float64Array(count));
  let ticks = 0;
  for (let i = 0; i < count; i++) {
    start[i] = (ticks += row.step[i]) * tick;
    end[i] = (ticks + row.length[i]) * tick;
    latest[i] = Math.max(latest[i - 1] || 0, end[i]);
  }
  return { count, from: row.from, name: row.name, bytes: row.bytes, start, end, latest };
}

function readMemory(row, tick) {
  let ticks = 0, peak = 0;
  const time = Float64Array.from(row.step, (step) => (ticks += step) * tick);
  row.bytes.forEach((held, i) => { if (held > row.bytes[peak]) peak = i; });
  return { time, held: row.bytes, peak, most: row.bytes[peak] || 0 };
}

const traces = data.traces.map((trace) => ({
  ...trace,
  end: trace.end * trace.tick_s,
  updates: trace.updates.map((update) => update * trace.tick_s),
  rows: trace.rows.map((row) => readRow(trace, row)),
  messages: trace.messages.map((lanes) => lanes.map((row) => readMessages(row, trace.tick_s))),
  memory: trace.memory.map((row) => readMemory(row, trace.tick_s)),
}));
for (const trace of traces) trace.most = Math.max(1, ...trace.memory.map((memory) => memory.most));
const END = Math.max(...traces.map((trace) => trace.end)) || 1;
const isPair = traces.length > 1;
const numDevices = Math.max(...traces.map((trace) => trace.rows.length));
const numRows = traces.reduce((sum, trace) => sum + trace.rows.length, 0);

const mostDigits = String(Math.max(...traces.flatMap((trace) => trace.rows.flatMap((row) => row.most)))).length;

// The first position in a sorted list whose value is greater.
function behind(list, value, count = list.length) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

// ---- Words

const UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]];
const unitOf = (seconds) => UNITS.find((unit) => Math.abs(seconds) >= unit[1] * 0.99995) || UNITS[seconds ? 3 : 0];
function inUnits(seconds, [name, size], digits) {
  return `${Number((seconds / size).toPrecision(digits))} ${name}`;
}
const duration = (seconds) => inUnits(seconds, unitOf(seconds), 4);
const moment = (seconds) => inUnits(seconds, unitOf(END), 7); // exact enough to tell neighbors apart
function amount(bytes) {
  const power = bytes >= 1 ? Math.min(Math.floor(Math.log10(bytes * 1.0005) / 3), 5) : 0;
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB", "PB"][power]}`;
}
const percent = (share) => `${(100 * share).toFixed(1)}%`;
