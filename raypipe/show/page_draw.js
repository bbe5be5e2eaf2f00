
// Draws the timeline; page.py writes everything else on the page.
//
// Times are seconds. `view` is what is shown of them, `at` what the pointer is on, `pinned` a microbatch that stays lit, `lit` the
// one that is. A lane is a stripe of the timeline that shows the Ops or the memory of one device, or a link to it.

// ---- Colours: those of the style sheet, and for causes the patterns that the page's own drawings use

let theme = {};
function readTheme() {
  const style = getComputedStyle(document.documentElement);
  theme = { fills: [], flat: [], colours: new Map() };
  for (const name of ["paper", "text", "soft", "line", "row", "accent", "message", "sum", "held", "held-line"])
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  CAUSES.forEach((cause, number) => {
    if (!number) return;
    const [ground, lines] = element(`p-${cause.key}`).children;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 16; // twice its size, for fine screens
    const paint = tile.getContext("2d");
    paint.scale(2, 2);
    paint.fillStyle = theme.flat[number] = getComputedStyle(ground).fill;
    paint.fillRect(0, 0, 8, 8);
    const { stroke, strokeWidth } = getComputedStyle(lines);
    Object.assign(paint, { strokeStyle: stroke, lineWidth: parseFloat(strokeWidth), lineCap: "round" });
    paint.stroke(new Path2D(lines.getAttribute("d")));
    theme.fills[number] = paint.createPattern(tile, "repeat");
    theme.fills[number].setTransform(new DOMMatrix().scale(0.5));
  });
}

// Of several updates, the one in the middle.
function firstView() {
  const counts = traces.map((trace) => trace.updates.length);
  const middle = Math.floor((Math.min(...counts) - 1) / 2);
  if (middle < 1) return { from: 0, to: END };
  const from = Math.min(...traces.map((trace) => trace.updates[middle - 1]));
  const to = Math.max(...traces.map((trace) => trace.updates[middle]));
  return to > from ? { from, to } : { from: 0, to: END };
}

const STRIPE = 0.2; // of an Op, in the colour of its branch

// Pipelines of odd numbers are lighter, the later stages of a device darker.
function colourOf(kind, pipeline, shade, shades) {
  const key = `${kind} ${pipeline % 2} ${shade} ${shades}`;
  if (!theme.colours.has(key)) {
    const { colour, odd } = data.kinds[kind];
    const share = shades > 1 ? (0.28 * shade) / (shades - 1) : 0;
    const channels = (pipeline % 2 ? odd : colour).match(/\w\w/g).map((channel) => Math.round(parseInt(channel, 16) * (1 - share)));
    theme.colours.set(key, `rgb(${channels})`);
  }
  return theme.colours.get(key);
}

// ---- Layout

const view = firstView();
const shows = { messages: numRows <= 48, memory: numRows <= 24, pairs: false };
let at = null, pinned = -1, lit = -1;
let layout = {};

function layOut() {
  const width = element("chart").clientWidth;
  const high = [[6, 30], [14, 26], [32, 20], [72, 15], [140, 10], [300, 7], [Infinity, 4]].find(([most]) => numRows <= most)[1];
  const gap = high >= 15 ? 5 : high >= 7 ? 2 : 1;
  const paint = element("rows").getContext("2d");
  paint.font = `12px ${FONT}`;
  const longest = Math.max(0, ...traces.flatMap((trace) => trace.devices.map((name) => paint.measureText(name).width)));
  const left = Math.ceil(Math.min(longest, width < 700 ? 70 : 180)) + 12;
  const right = width < 560 ? 8 : shows.memory && traces.some((trace) => trace.memory.length) ? 84 : 58;
  layout = { width, left, right, high, lanes: [], titles: [], pixels: Math.max(width - left - right, 20) };
  let y = 4;
  let named = -Infinity; // where the last name stands: of narrow lanes only some have one
  const add = (trace, device) => {
    const lane = (draws, tall, messages) => {
      const isNamed = draws === "ops" && y - named >= 12;
      if (isNamed) named = y;
      layout.lanes.push({ trace, device, draws, messages, y, high: tall, named: isNamed });
      y += tall + 1;
    };
    lane("ops", high);
    if (shows.messages) for (const link of trace.messages[device]) lane("messages", high >= 15 ? 5 : 3, link);
    if (shows.memory && trace.memory.length) lane("memory", 24);
    y += gap - 1;
  };
  const title = (text) => { layout.titles.push({ y: y + 12, text }); y += 24; };
  if (isPair && shows.pairs) {
    title(`of each device ${traces[0].word} above ${traces[1].word}`);
    for (let device = 0; device < numDevices; device++, y += gap + 1)
      for (const trace of traces.filter((one) => device < one.rows.length)) add(trace, device);
  } else {
    for (const trace of traces) {
      if (isPair) title(`${trace.word}: ${trace.name}`);
      trace.rows.forEach((_, device) => add(trace, device));
      if (isPair) y += 8;
    }
  }
  layout.height = y + 2;
  [["overview", 40], ["axis", 22], ["rows", layout.height]].forEach(([id, tall]) => size(element(id), width, tall));
  element("rows").setAttribute("aria-label", `Timeline of ${numRows} devices over ${duration(END)}; the tables below hold its figures.`);
}

function size(canvas, width, height) {
  // Browsers refuse canvases of more than some tens of millions of pixels.
  const ratio = Math.min(window.devicePixelRatio || 1, Math.sqrt(4e7 / (width * height)));
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  canvas.style.height = `${height}px`;
  canvas.getContext("2d").setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
}

const xOf = (time) => layout.left + ((time - view.from) / (view.to - view.from)) * layout.pixels;
const timeAt = (x) => view.from + ((x - layout.left) / layout.pixels) * (view.to - view.from);

// ---- Drawing

let isDue = false, drawsAll = false;
function redraw() {
  if (!isDue) requestAnimationFrame(draw);
  isDue = true;
}

function draw() {
  isDue = false;
  drawOverview(element("overview").getContext("2d"));
  drawAxis(element("axis").getContext("2d"));
  const paint = element("rows").getContext("2d");
  const top = drawsAll ? -Infinity : -element("rows").getBoundingClientRect().top - 300;
  const bottom = drawsAll ? Infinity : top + window.innerHeight + 600;
  paint.clearRect(0, 0, layout.width, layout.height);
  paint.textBaseline = "middle";
  paint.fillStyle = theme.line;
  for (const tick of ticksOf()) paint.fillRect(Math.round(xOf(tick.time)), 0, 1, layout.height);
  for (const title of layout.titles) write(paint, title.text, 0, title.y, `600 13px ${FONT}`, "left", layout.width);
  for (const lane of layout.lanes) if (lane.y < bottom && lane.y + lane.high > top) drawLane(paint, lane);
  placeOutline();
}

// The text, cut where it does not fit.
function write(paint, text, x, y, font, align, most, colour = theme.text) {
  Object.assign(paint, { font, textAlign: align, fillStyle: colour });
  let keep = text.length;
  const shown = () => (keep < text.length ? `${text.slice(0, keep)}\u2026` : text);
  while (keep > 1 && paint.measureText(shown()).width > most) keep--;
  paint.fillText(shown(), x, y);
}

// Round times about 92 pixels apart.
function ticksOf() {
  const rough = ((view.to - view.from) / layout.pixels) * 92;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * (1 - 1e-9)) * power;
  const [name, unit] = unitOf(view.to);
  const places = Math.max(0, Math.min(12, -Math.floor(Math.log10((step / unit) * 1.0001))));
  const found = [];
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to * (1 + 1e-12); i++)
    found.push({ time: i * step, text: `${((i * step) / unit).toFixed(places)} ${name}` });
  return found;
}

function drawAxis(paint) {
  const hasBubbles = layout.right > 40;
  const edge = hasBubbles ? layout.left + layout.pixels + 8 : layout.width;
  paint.clearRect(0, 0, layout.width, 22);
  paint.textBaseline = "middle";
  paint.font = `12px ${FONT}`;
  for (const tick of ticksOf()) {
    const half = paint.measureText(tick.text).width / 2;
    const x = Math.max(xOf(tick.time), half);
    if (x + half > edge) continue;
    write(paint, tick.text, x, 10, `12px ${FONT}`, "center", 300, theme.soft);
    paint.fillRect(Math.round(xOf(tick.time)), 18, 1, 4);
  }
  if (hasBubbles) write(paint, "bubble", layout.width, 10, `12px ${FONT}`, "right", layout.right - 8, theme.soft);
}

function drawLane(paint, lane) {
  const { trace, device, draws, y, high } = lane;
  const middle = y + high / 2 + 0.5;
  if (lane.named) {
    const font = `${high >= 15 ? 12 : 9}px ${FONT}`;
    write(paint, trace.devices[device], layout.left - 8, middle, font, "right", layout.left - 8);
    if (layout.right > 40) write(paint, percent(trace.bubbles[device]), layout.width, middle, font, "right", layout.right - 4, theme.soft);
  } else if (draws === "memory" && layout.right > 40) {
    write(paint, `peak ${amount(trace.memory[device].most)}`, layout.width, middle, `11px ${FONT}`, "right", layout.right - 4, theme.soft);
  }
  paint.save();
  paint.beginPath();
  paint.rect(layout.left, y - 1, layout.pixels, high + 2);
  paint.clip();
  if (draws === "ops") drawOps(paint, trace, trace.rows[device], y, high);
  else if (draws === "messages") drawMessages(paint, lane.messages, y, high);
  else drawMemory(paint, trace, trace.memory[device], y, high);
  paint.restore();
}

const isOf = (pieces, i, microbatch) =>
  microbatch >= 0 && (pieces.microbatch[i] === microbatch || (pieces.microbatch[i] === SEVERAL && pieces.several.get(i).has(microbatch)));

// Pieces that are too narrow are put together in stripes that show how much of them each kind and cause takes.
function drawOps(paint, trace, pieces, y, high) {
  const scale = layout.pixels / (view.to - view.from);
  const sums = new Float64Array(KINDS.length + CAUSES.length);
  let begin = 0, total = 0, isLit = false;
  const flush = () => {
    if (!total) return;
    let bottom = y + high;
    paint.globalAlpha = lit >= 0 && !isLit ? 0.3 : 1;
    sums.forEach((sum, group) => {
      if (!sum) return;
      const part = (sum / total) * high;
      bottom -= part;
      paint.fillStyle = group < KINDS.length ? colourOf(KINDS[group], 0, 0, 1) : theme.flat[group - KINDS.length];
      paint.fillRect(xOf(begin), bottom, Math.max(total * scale, 0.5), part + 0.3);
    });
    sums.fill(0);
    total = 0;
    isLit = false;
  };
  paint.fillStyle = theme.row;
  paint.fillRect(layout.left, y, layout.pixels, high);
  for (let i = Math.max(behind(pieces.time, view.from) - 1, 0); i < pieces.count && pieces.time[i] < view.to; i++) {
    const length = pieces.time[i + 1] - pieces.time[i];
    if (length * scale >= LEAST_PIXELS) {
      flush();
      drawPiece(paint, trace, pieces, i, y, high, length * scale);
      continue;
    }
    if (!total) begin = pieces.time[i];
    sums[pieces.group[i]] += length;
    total += length;
    isLit ||= !pieces.cause[i] && isOf(pieces, i, lit);
    if (total * scale >= BUCKET_PIXELS) flush();
  }
  flush();
  paint.globalAlpha = 1;
  paint.fillStyle = theme.text; // where updates end
  if (trace.updates.length > 1) for (const end of trace.updates) paint.fillRect(Math.round(xOf(end)) - 1, y - 1, 1, high + 2);
}

function drawPiece(paint, trace, pieces, i, y, high, width) {
  const x = xOf(pieces.time[i]);
  paint.globalAlpha = lit < 0 || isOf(pieces, i, lit) ? 1 : pieces.cause[i] ? 0.45 : 0.22;
  if (pieces.cause[i]) {
    paint.fillStyle = theme.fills[pieces.cause[i]];
    paint.fillRect(x, y, width, high);
    return;
  }
  const shown = width > 3 ? width - 1 : width * 0.85;
  const parts = partsOf(pieces.name[i]);
  parts.forEach(({ kind, stage, index, pipeline, texts }, part) => {
    const top = y + (part * high) / parts.length, tall = high / parts.length;
    paint.fillStyle = colourOf(kind, pipeline, pieces.shade[i], pieces.shades);
    paint.fillRect(x, top, shown, tall);
    const branch = branchOf(trace, stage);
    if (branch) {
      paint.fillStyle = branch.colour;
      paint.fillRect(x, top, shown, tall * STRIPE);
    }
    const from = Math.max(x, layout.left), to = Math.min(x + shown, layout.left + layout.pixels);
    if (to - from < 9 || tall < 9) return;
    paint.font = `${tall >= 15 ? 11 : 9}px ${FONT}`;
    const spare = "8".repeat(Math.max(mostDigits - String(index).length, 0)); // neighbors are labelled all or none
    const marked = branch ? [...texts.slice(0, -1).map((words) => branch.letter + words), ...texts.slice(-1)] : texts;
    const text = marked.find((words) => paint.measureText(words + spare).width + 3 <= to - from);
    if (text) write(paint, text, (from + to) / 2, top + (tall * (branch ? 1 + STRIPE : 1)) / 2 + 0.5, paint.font, "center", 300, "#111");
  });
}

// What is drawn of an Op or of Ops that overlap, those of one kind, stage and pipeline as one; with labels, the longest first.
const knownParts = new Map();
function partsOf(name) {
  if (!knownParts.has(name)) {
    const groups = new Map();
    for (const op of opsOf(name)) {
      const alike = `${op.stage}${op.kind}@${op.pipeline}`;
      groups.set(alike, [...(groups.get(alike) || []), op]);
    }
    knownParts.set(name, [...groups.values()].map((ops) => {
      const { stage, kind, index, pipeline } = ops[0];
      const work = ops.map((op) => (op.part ? `${op.index}.${op.part}` : op.index)).join("+");
      const whole = `${data.with_stage ? stage : ""}${kind}${work}`;
      return { kind, stage, index, pipeline, texts: [...(pipeline ? [`${whole}@${pipeline}`] : []), whole, work] };
    }));
  }
  return knownParts.get(name);
}

function drawMessages(paint, messages, y, high) {
  let last = -Infinity;
  for (let i = behind(messages.latest, view.from, messages.count); i < messages.count && messages.start[i] < view.to; i++) {
    const x = xOf(messages.start[i]), end = xOf(messages.end[i]);
    if (end - last < 0.7) continue; // hidden by what is drawn
    last = end;
    paint.fillStyle = messages.name[i][0] === " " ? theme.sum : theme.message;
    paint.globalAlpha = lit < 0 || messageOf(messages.name[i]).index === lit ? 0.7 : 0.15;
    paint.fillRect(x, y, Math.max(end - x - 0.5, 0.7), high);
  }
  paint.globalAlpha = 1;
}

function drawMemory(paint, trace, { time, held }, y, high) {
  const level = (bytes) => y + high - (Math.max(bytes, 0) / trace.most) * (high - 1);
  const line = new Path2D();
  let before = y + high, column = -Infinity, most = 0;
  const first = Math.max(behind(time, view.from) - 1, 0);
  line.moveTo(xOf(time[first] ?? 0), before);
  for (let i = first; i < time.length && time[i] < view.to; i++) {
    const x = xOf(time[i]);
    most = x - column < 0.8 ? Math.max(most, held[i]) : held[i]; // of many steps in a pixel the highest counts
    if (x - column >= 0.8) column = x;
    line.lineTo(x, before);
    line.lineTo(x, (before = level(most)));
  }
  const end = xOf(Math.min(trace.end, view.to));
  line.lineTo(end, before);
  line.lineTo(end, y + high);
  Object.assign(paint, { fillStyle: theme.held, strokeStyle: theme["held-line"], lineWidth: 1 });
  paint.fill(line);
  paint.stroke(line);
}

// For each trace and pixel of the overview, the share of devices that compute.
let busy = [];
function sumBusy() {
  const columns = Math.max(Math.floor(layout.pixels), 1);
  busy = traces.map((trace) => {
    const sums = new Float64Array(columns);
    for (const pieces of trace.rows) {
      for (let i = 0; i < pieces.count; i++) {
        if (pieces.cause[i]) continue;
        const from = (pieces.time[i] / END) * columns, to = Math.min((pieces.time[i + 1] / END) * columns, columns);
        for (let column = Math.floor(from); column < to; column++) sums[column] += Math.min(to, column + 1) - Math.max(from, column);
      }
    }
    return sums.map((sum) => sum / trace.rows.length);
  });
}

function drawOverview(paint) {
  const { left, pixels } = layout;
  const top = 4, base = 36;
  paint.clearRect(0, 0, layout.width, 40);
  paint.fillStyle = theme.row;
  paint.fillRect(left, top, pixels, base - top);
  busy.forEach((shares, number) => {
    const path = new Path2D();
    path.moveTo(left, base);
    shares.forEach((share, column) => path.lineTo(left + ((column + 0.5) * pixels) / shares.length, base - share * (base - top)));
    path.lineTo(left + pixels, base);
    Object.assign(paint, { fillStyle: theme.soft, strokeStyle: theme.accent, lineWidth: 1, globalAlpha: number ? 1 : 0.35 });
    if (number) paint.stroke(path); else paint.fill(path);
  });
  const from = left + (view.from / END) * pixels, to = left + (view.to / END) * pixels;
  Object.assign(paint, { fillStyle: theme.paper, globalAlpha: 0.6 });
  paint.fillRect(left, top, from - left, base - top);
  paint.fillRect(to, top, left + pixels - to, base - top);
  Object.assign(paint, { strokeStyle: theme.accent, globalAlpha: 1, lineWidth: 1.5, textBaseline: "middle" });
  paint.strokeRect(from, top - 1, Math.max(to - from, 1.5), base - top + 2);
  if (left >= 40) write(paint, "busy", left - 8, 20, `12px ${FONT}`, "right", left - 8, theme.soft);
}

