
// Moves what is shown, says what the pointer is on, and listens to pointer, keys and switches.

// ---- Moving

function show(from, to) {
  const length = Math.min(Math.max(to - from, END * 1e-7), END);
  view.from = Math.min(Math.max((from + to - length) / 2, 0), END - length);
  view.to = view.from + length;
  redraw();
}
function zoom(factor, around = (view.from + view.to) / 2) {
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
}
const pan = (seconds) => show(view.from + seconds, view.to + seconds);
const showAll = () => show(0, END);
const isWhole = () => view.to - view.from >= END * (1 - 1e-12);

function pin(microbatch) {
  pinned = microbatch;
  element("pinned").hidden = pinned < 0;
  element("pinned").textContent = `microbatch ${pinned} \u00d7`;
  light();
}
function light() {
  const now = pinned >= 0 ? pinned : at ? at.microbatch : -1;
  if (now !== lit) redraw();
  lit = now;
}

// ---- Pointing

// What is at a place of the timeline: its microbatch (-1 for none, or where it is too narrow to be meant), lines that tell of it,
// and where it is.
function find(x, y) {
  const lane = layout.lanes.find((one) => y >= one.y && y <= one.y + one.high);
  const time = timeAt(x);
  if (!lane || x < layout.left || time > Math.min(lane.trace.end, view.to)) return null;
  const { trace, device } = lane;
  const where = [...(isPair ? [["trace", trace.word]] : []), ["device", trace.words[device]]];
  if (lane.draws === "ops") {
    const pieces = trace.rows[device];
    const i = behind(pieces.time, time, pieces.count) - 1;
    if (i < 0) return null;
    const wide = ((pieces.time[i + 1] - pieces.time[i]) / (view.to - view.from)) * layout.pixels >= LEAST_PIXELS;
    const microbatch = pieces.microbatch[i] === SEVERAL ? [...pieces.several.get(i)][0] : pieces.microbatch[i];
    const lines = pieces.cause[i] ? idleLines(trace, pieces, i, where) : opLines(trace, device, pieces, i, where);
    return { lane, microbatch: wide ? microbatch : -1, lines, from: pieces.time[i], to: pieces.time[i + 1] };
  }
  if (lane.draws === "messages") {
    const { messages } = lane;
    const sender = messages.from >= 0 ? [["from", trace.words[messages.from]]] : [];
    let i = behind(messages.start, time, messages.count) - 1;
    while (i >= 0 && messages.end[i] < time && messages.latest[i] >= time) i--;
    if (i < 0 || messages.end[i] < time) return null;
    const [from, to, message] = [messages.start[i], messages.end[i], messageOf(messages.name[i])];
    const lines = [`${message.text}, on its way`, ...sender, ...where, ...timeLines(from, to), ...bytesLine(valueAt(messages.bytes, i))];
    return { lane, microbatch: message.index, lines, from, to };
  }
  const memory = trace.memory[device];
  const i = behind(memory.time, time) - 1;
  if (i < 0) return null;
  const peak = `${amount(memory.most)} at ${moment(memory.time[memory.peak])}`;
  const lines = [`${amount(memory.held[i])} held`, ...where, ["at", moment(time)], ["peak", peak]];
  return { lane, microbatch: -1, lines, from: 0, to: 0 };
}

const timeLines = (from, to) => [["start", moment(from)], ["end", moment(to)], ["lasts", duration(to - from)]];
const bytesLine = (bytes) => (bytes ? [["size", amount(bytes)]] : []);

function idleLines(trace, pieces, i, where) {
  const cause = CAUSES[pieces.cause[i]], message = messageOf(pieces.name[i]);
  return [
    `idle: ${cause.name}`, ["why", cause.meaning], ...(message.text ? [["for", message.text]] : []),
    ...(pieces.peer[i] >= 0 ? [["waits for", trace.words[pieces.peer[i]]]] : []),
    ...where, ...timeLines(pieces.time[i], pieces.time[i + 1]), ...bytesLine(pieces.bytes[i]),
  ];
}

function opLines(trace, device, pieces, i, where) {
  const ops = opsOf(pieces.name[i]);
  const kindOf = (op) => data.kinds[op.kind].name;
  const facts = (op) => [
    ["stage", op.stage], ...(branchOf(trace, op.stage) ? [["branch", branchOf(trace, op.stage).name]] : []),
    [isPerUpdate(op) ? "update" : "microbatch", op.index], ...(op.pipeline ? [["pipeline", op.pipeline]] : []),
  ];
  const of = ops.length > 1 ? ops.map((op) => [kindOf(op), facts(op).flat().join(" ")]) : facts(ops[0]);
  return [
    ops.map((op) => (ops.length > 1 ? op.text : `${op.text} ${kindOf(op)}`)).join(" with "), ...where, ...of,
    ...timeLines(pieces.time[i], pieces.time[i + 1]),
    ...otherLine(trace, device, pieces.name[i], pieces.time[i + 1] - pieces.time[i]),
  ];
}

// How long the same Op takes in the other trace.
function otherLine(trace, device, name, length) {
  const other = traces.find((one) => one !== trace);
  const pieces = other && other.rows[device];
  if (!pieces) return [];
  pieces.places ||= new Map(pieces.name.map((known, i) => [known, i]));
  const i = pieces.places.get(name);
  if (i === undefined) return [];
  const change = length - (pieces.time[i + 1] - pieces.time[i]);
  return [[other.word, `${duration(length - change)}, so here ${change < 0 ? "\u2212" : "+"}${duration(Math.abs(change))}`]];
}

function tell(lines, x, y) {
  const tip = element("tip");
  tip.hidden = !lines;
  if (!lines) return;
  const title = document.createElement("b"), list = document.createElement("dl");
  title.textContent = lines[0];
  for (const words of lines.slice(1))
    ["dt", "dd"].forEach((tag, column) => { list.appendChild(document.createElement(tag)).textContent = words[column]; });
  tip.replaceChildren(title, list);
  const box = tip.getBoundingClientRect();
  const beside = x + 16 + box.width > window.innerWidth - 8 ? x - box.width - 16 : x + 16;
  tip.style.left = `${Math.max(beside, 8)}px`;
  tip.style.top = `${Math.max(Math.min(y + 14, window.innerHeight - box.height - 8), 8)}px`;
}

function placeOutline() {
  const outline = element("outline");
  const from = at && Math.max(xOf(at.from), layout.left), to = at && Math.min(xOf(at.to), layout.left + layout.pixels);
  outline.hidden = !at || to - from < 1;
  if (outline.hidden) return;
  const top = element("rows").offsetTop + at.lane.y - 2;
  Object.assign(outline.style, { left: `${from - 2}px`, width: `${to - from + 3}px`, top: `${top}px`, height: `${at.lane.high + 4}px` });
}

function point(event) {
  const box = element("rows").getBoundingClientRect();
  const x = event.clientX - box.left;
  at = find(x, event.clientY - box.top);
  tell(at && at.lines, event.clientX, event.clientY);
  element("cursor").hidden = x < layout.left || x > layout.left + layout.pixels;
  element("cursor").style.left = `${x}px`;
  light();
  placeOutline();
}
function leave() {
  at = null;
  tell(null);
  element("cursor").hidden = true;
  light();
  placeOutline();
}

// ---- Listening

function listenToRows(chart, rows) {
  let held = null; // where the pointer went down, and what was shown then
  chart.addEventListener("wheel", (event) => {
    const step = event.deltaMode ? 30 : 1;
    const isAside = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isAside && event.deltaY > 0 && isWhole()) return; // nothing left to zoom out of: the page scrolls
    event.preventDefault();
    if (isAside) pan((((event.deltaX || event.deltaY) * step) / layout.pixels) * (view.to - view.from));
    else zoom(Math.exp(event.deltaY * step * 0.0022), timeAt(Math.max(event.clientX - rows.getBoundingClientRect().left, layout.left)));
    point(event);
  }, { passive: false });
  rows.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.clientX, y: event.clientY, from: view.from, moved: false };
    rows.setPointerCapture(event.pointerId);
  });
  rows.addEventListener("pointermove", (event) => {
    if (!held) return point(event);
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    held.moved ||= Math.abs(dx) + Math.abs(dy) > 4;
    if (!held.moved) return;
    chart.classList.add("moving");
    leave();
    pan(held.from - (dx / layout.pixels) * (view.to - view.from) - view.from);
    if (event.pointerType !== "mouse") return;
    window.scrollBy(0, -dy);
    held.y = event.clientY;
  });
  const release = (event) => {
    if (held && !held.moved && event.type === "pointerup") {
      point(event);
      pin(at && at.microbatch !== pinned ? at.microbatch : -1);
    }
    held = null;
    chart.classList.remove("moving");
  };
  for (const name of ["pointerup", "pointercancel"]) rows.addEventListener(name, release);
  rows.addEventListener("pointerleave", () => held || leave());
  rows.addEventListener("dblclick", () => { pin(-1); showAll(); });
}

// A drag in the overview moves what is shown, or chooses it.
function listenToOverview(overview) {
  let held = null;
  const timeOf = (event) => {
    const share = (event.clientX - overview.getBoundingClientRect().left - layout.left) / layout.pixels;
    return Math.min(Math.max(share, 0), 1) * END;
  };
  overview.addEventListener("pointerdown", (event) => {
    const time = timeOf(event);
    held = { time, moves: !isWhole() && time >= view.from && time <= view.to, offset: time - view.from };
    overview.setPointerCapture(event.pointerId);
  });
  overview.addEventListener("pointermove", (event) => {
    if (!held) return;
    const time = timeOf(event);
    if (held.moves) pan(time - held.offset - view.from);
    else if (Math.abs(time - held.time) > END * 0.004) show(Math.min(time, held.time), Math.max(time, held.time));
  });
  overview.addEventListener("pointerup", (event) => {
    if (held && !held.moves && timeOf(event) === held.time) pan(held.time - (view.from + view.to) / 2);
    held = null;
  });
  overview.addEventListener("dblclick", showAll);
}

function listen() {
  const chart = element("chart");
  listenToRows(chart, element("rows"));
  listenToOverview(element("overview"));
  const eighth = () => (view.to - view.from) / 8;
  const keys = {
    ArrowLeft: () => pan(-eighth()), ArrowRight: () => pan(eighth()), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
    0: showAll, Home: showAll, Escape: () => pin(-1),
  };
  chart.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });
  const buttons = { closer: () => zoom(0.5), farther: () => zoom(2), all: showAll, pinned: () => pin(-1) };
  for (const [id, act] of Object.entries(buttons)) element(id).addEventListener("click", act);
  for (const button of document.querySelectorAll("[data-shows]")) {
    const press = () => button.setAttribute("aria-pressed", String(shows[button.dataset.shows]));
    button.addEventListener("click", () => { shows[button.dataset.shows] = !shows[button.dataset.shows]; press(); renew(); });
    press();
  }
  window.addEventListener("scroll", redraw, { passive: true });
  new ResizeObserver(() => element("chart").clientWidth !== layout.width && renew()).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  for (const [name, begins] of [["beforeprint", true], ["afterprint", false]]) {
    window.addEventListener(name, () => {
      document.documentElement.toggleAttribute("data-print", begins);
      drawsAll = begins;
      renew();
      draw();
    });
  }
}

function renew() {
  readTheme();
  layOut();
  sumBusy();
  redraw();
}

listen();
renew();
