// Paints the columns of timeline.py on a canvas. What is where was decided there; here is only what depends on the
// zoom: which items are in sight, the axis, and what is under the pointer.

const COLUMNS = {
  starts: Float64Array, ends: Float64Array, lanes: Uint16Array, rows: Uint16Array, kinds: Uint8Array, requests: Uint32Array,
};
const ROLES = ["proxy", "P", "D", "text", "muted", "line", "ground"];
const MARK = 2; // how wide a step is, in pixels
const NARROWEST = 400;
const REACH = 3; // how far from an item the pointer may be, in pixels
const FONT = '"DejaVu Sans", ui-sans-serif, "Segoe UI", sans-serif';

function load(model) {
  const data = { place: model.get("place") };
  for (const [name, Type] of Object.entries(COLUMNS)) {
    const view = model.get(name); // a DataView, at any offset: copied, so that numbers are aligned
    data[name] = new Type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  }
  data.names = data.place.names.split("\n");
  data.runs = runs(data);
  // Of all rows of all lanes: how many are before each lane's, and up to which pixel each is taken.
  data.before = [];
  let count = 0;
  for (const { depth } of data.place.lanes) {
    data.before.push(count);
    count += depth;
  }
  data.taken = new Float64Array(count);
  return data;
}

// Items of one kind are together, by their start: from `from` to `to`, and none is longer than `longest`.
function runs({ starts, ends, kinds }) {
  const found = [];
  for (let i = 0; i < kinds.length; i++) {
    if (i === 0 || kinds[i] !== kinds[i - 1]) found.push({ kind: kinds[i], from: i, to: i, longest: 0 });
    const run = found.at(-1);
    run.to = i + 1;
    run.longest = Math.max(run.longest, ends[i] - starts[i]);
  }
  return found;
}

function firstAt(starts, time, from, to) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (starts[middle] < time) from = middle + 1;
    else to = middle;
  }
  return from;
}

function coloursOf(root) {
  const style = getComputedStyle(root);
  return Object.fromEntries(ROLES.map((role) => [role, style.getPropertyValue(`--pdlab-${role}`).trim()]));
}

function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) {
    pen.beginPath();
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

// Seconds between two ticks, at least `least`: 1, 2 or 5 times a power of ten.
function spacing(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least);
}

function seconds(time, step) {
  const [unit, factor] = step >= 0.1 ? ["s", 1] : step >= 1e-4 ? ["ms", 1e3] : ["µs", 1e6];
  const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  return `${(time * factor).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
}

class Painter {
  constructor(root, canvas) {
    [this.root, this.canvas, this.context] = [root, canvas, canvas.getContext("2d")];
    this.chosen = -1;
  }

  take(data) {
    this.data = data;
    this.resize();
    this.all();
  }

  // As wide as the page has room for, up to what was asked for. Whether that changed anything.
  resize() {
    const { width, height } = this.data.place;
    const fitting = Math.min(width, Math.max(this.root.clientWidth || width, NARROWEST));
    const dense = window.devicePixelRatio || 1;
    if (fitting === this.width && this.canvas.height === Math.round(height * dense)) return false;
    this.width = fitting;
    [this.canvas.width, this.canvas.height] = [Math.round(fitting * dense), Math.round(height * dense)];
    [this.canvas.style.width, this.canvas.style.height] = [`${fitting}px`, `${height}px`];
    this.context.setTransform(dense, 0, 0, dense, 0, 0);
    return true;
  }

  recolour() {
    this.colours = coloursOf(this.root);
    this.hatches = Object.fromEntries(["proxy", "P", "D"].map((role) => [role, hatch(this.context, this.colours[role])]));
  }

  // What is in sight, in seconds -----------------------------------------------------------------------------------

  all() {
    const end = this.data.place.end || 1e-3;
    [this.from, this.to] = [-0.01 * end, 1.02 * end];
  }

  get scale() {
    return (this.width - this.data.place.left) / (this.to - this.from);
  }

  x(time) {
    return this.data.place.left + (time - this.from) * this.scale;
  }

  time(x) {
    return this.from + (x - this.data.place.left) / this.scale;
  }

  zoom(factor, x) {
    const whole = (this.data.place.end || 1e-3) * 1.5;
    const span = Math.min(Math.max((this.to - this.from) * factor, 1e-6), whole);
    const at = this.time(x);
    this.from = at - (span * (x - this.data.place.left)) / (this.width - this.data.place.left);
    this.to = this.from + span;
    this.keep();
  }

  pan(pixels) {
    const shift = pixels / this.scale;
    this.from += shift;
    this.to += shift;
    this.keep();
  }

  // Some of it stays in sight.
  keep() {
    const span = this.to - this.from;
    const end = this.data.place.end;
    this.from = Math.min(Math.max(this.from, -span * 0.9), end - span * 0.1);
    this.to = this.from + span;
  }

  *inSight(left, right) {
    for (const run of this.data.runs) {
      const from = firstAt(this.data.starts, left - run.longest, run.from, run.to);
      yield [run.kind, from, firstAt(this.data.starts, right, from, run.to)];
    }
  }

  box(i, look) {
    const { starts, ends, lanes, rows, place } = this.data;
    const lane = place.lanes[lanes[i]];
    const x = this.x(starts[i]);
    const width = look.fill === "mark" ? MARK : Math.max((ends[i] - starts[i]) * this.scale, 1);
    return [x, lane.top + lane.row * (rows[i] + look.top), width, Math.max(lane.row * look.height, 1)];
  }

  // Painting -------------------------------------------------------------------------------------------------------

  paint() {
    const { height, left } = this.data.place;
    const { width } = this;
    const pen = this.context;
    pen.globalAlpha = 1;
    pen.fillStyle = this.colours.ground;
    pen.fillRect(0, 0, width, height);
    this.axis();
    this.lanes();
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left, height);
    pen.clip();
    for (const [kind, from, to] of this.inSight(this.from, this.to)) this.run(this.data.place.looks[kind], from, to);
    this.outline();
    pen.restore();
  }

  axis() {
    const { height, left, axis } = this.data.place;
    const { width } = this;
    const step = spacing(90 / this.scale);
    const pen = this.context;
    pen.font = `11px ${FONT}`;
    pen.textAlign = "center";
    for (let n = Math.ceil(this.from / step); n * step < this.to; n++) {
      const x = Math.round(this.x(n * step)) + 0.5;
      pen.fillStyle = this.colours.line;
      pen.globalAlpha = 0.6;
      pen.fillRect(x, axis - 6, 1, height - axis);
      pen.globalAlpha = 1;
      pen.fillStyle = this.colours.muted;
      if (x > left + 20 && x < width - 30) pen.fillText(seconds(n * step, step), x, axis - 11);
    }
  }

  lanes() {
    const { lanes } = this.data.place;
    const { width } = this;
    const pen = this.context;
    pen.textAlign = "start";
    pen.font = `600 12px ${FONT}`;
    for (const lane of lanes) {
      pen.fillStyle = this.colours.line;
      pen.fillRect(0, lane.top - 5, width, 1);
      pen.fillStyle = this.colours[lane.role];
      pen.fillText(lane.name, 8, lane.top + 14);
    }
  }

  // All items of one kind; but what would fall on a pixel that the last one in its row has taken is left out.
  run(look, from, to) {
    const pen = this.context;
    const { starts, ends, lanes, rows } = this.data;
    const taken = this.data.taken.fill(-Infinity);
    const label = this.labelled(look);
    const { solid, wide, narrow } = this.paints(look);
    let paint = null; // setting it is what costs most
    for (let i = from; i < to; i++) {
      const row = this.data.before[lanes[i]] + rows[i];
      if (this.x(ends[i]) < taken[row]) continue;
      const [x, y, width, height] = this.box(i, look);
      taken[row] = Math.floor(x + width) + 1;
      const mine = width < 4 || height < 4 ? narrow : wide;
      if (mine !== paint) [pen.fillStyle, pen.globalAlpha] = paint = mine;
      pen.fillRect(x, y, label && width > 4 ? width - 1 : width, height); // a gap before the stage that follows
      if (solid && !label) continue;
      if (!solid && mine === wide) {
        pen.globalAlpha = 1;
        pen.strokeRect(x + 0.5, y + 0.5, width - 2, height - 1);
        paint = null;
      }
      if (width > 40 && height >= 11) {
        this.write(label, look, x, y, width, height);
        paint = null;
      }
    }
  }

  // [colour or hatch, how opaque] of wide items and of those too narrow for a hatch.
  paints({ role, fill }) {
    const colour = this.colours[role];
    this.context.strokeStyle = colour;
    this.context.lineWidth = 1;
    const solid = fill === "solid" || fill === "mark";
    const wide = solid ? [colour, 1] : fill === "soft" ? [colour, 0.3] : [this.hatches[role], 1];
    return { solid, wide, narrow: [colour, solid ? 1 : fill === "soft" ? 0.3 : 0.6] };
  }

  labelled(look) {
    if (look.fill === "mark") return null;
    this.context.font = `10px ${FONT}`;
    return { text: look.name, width: this.context.measureText(look.name).width };
  }

  write(label, look, x, y, width, height) {
    const start = Math.max(x, this.data.place.left) + 5; // a bar that begins out of sight is still named
    if (start + label.width + 5 > x + width) return;
    const pen = this.context;
    pen.globalAlpha = 1;
    if (look.fill === "hatch") {
      pen.fillStyle = this.colours.ground;
      pen.fillRect(start - 3, y + 2, label.width + 6, height - 4);
    }
    pen.fillStyle = look.fill === "solid" ? this.colours.ground : this.colours.text;
    pen.fillText(label.text, start, y + height / 2 + 3.5);
  }

  outline() {
    if (this.chosen < 0) return;
    const pen = this.context;
    pen.globalAlpha = 1;
    pen.strokeStyle = this.colours.text;
    pen.lineWidth = 1.5;
    for (const [kind, from, to] of this.inSight(this.from, this.to)) {
      for (let i = from; i < to; i++) {
        if (this.data.requests[i] === this.chosen) pen.strokeRect(...this.box(i, this.data.place.looks[kind]));
      }
    }
  }

  // What is at a point: the last painted is on top; but a step, which is narrow, is found before a stage.
  at(x, y) {
    if (x < this.data.place.left) return -1;
    let [found, nearest] = [-1, Infinity];
    for (const [kind, from, to] of this.inSight(this.time(x - REACH - MARK), this.time(x + REACH))) {
      const look = this.data.place.looks[kind];
      for (let i = from; i < to; i++) {
        const [left, top, width, height] = this.box(i, look);
        if (y < top - 1 || y > top + height + 1) continue;
        const away = Math.max(left - x, x - left - width, 0);
        if (away <= REACH && away <= nearest) [found, nearest] = [i, away];
      }
    }
    return found;
  }

  says(i) {
    const { starts, ends, lanes, kinds, requests, names, place } = this.data;
    const look = place.looks[kinds[i]];
    const length = ends[i] - starts[i];
    const when = `at ${seconds(starts[i], 1e-4)}` + (look.fill === "mark" ? "" : `, ${seconds(length, length < 1e-3 ? 1e-6 : 1e-4)} long`);
    return `${look.name} · ${place.lanes[lanes[i]].name} · ${when} · request ${names[requests[i]]}`;
  }
}

const USAGE = "Ctrl + wheel, or + −: zoom · drag or ← →: move · double click or 0: all · click: choose a request";

function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "pdlab-figure pdlab-timeline";
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  const canvas = document.createElement("canvas");
  const says = document.createElement("output");
  says.value = USAGE;
  root.append(canvas, says);
  el.append(root);
  const painter = new Painter(root, canvas);
  let waiting = 0;
  let drag = null;

  function paint() {
    waiting = 0;
    const began = performance.now();
    painter.paint();
    root.dataset.drawn = Number(root.dataset.drawn ?? 0) + 1;
    root.dataset.milliseconds = (performance.now() - began).toFixed(1);
    [root.dataset.from, root.dataset.to] = [painter.from, painter.to];
  }

  // At most once a frame, however fast the wheel turns.
  function soon() {
    waiting ||= requestAnimationFrame(paint);
  }

  function take() {
    painter.take(load(model));
    painter.chosen = model.get("chosen");
    root.setAttribute("aria-label", painter.data.place.line);
    paint();
  }

  function recolour() {
    painter.recolour();
    soon();
  }

  function choose() {
    painter.chosen = model.get("chosen");
    soon();
  }

  const middle = () => (painter.data.place.left + painter.width) / 2;
  const KEYS = {
    "+": () => painter.zoom(0.7, middle()), "=": () => painter.zoom(0.7, middle()),
    "-": () => painter.zoom(1 / 0.7, middle()), "_": () => painter.zoom(1 / 0.7, middle()),
    ArrowLeft: () => painter.pan(-80), ArrowRight: () => painter.pan(80),
    0: () => painter.all(), Home: () => painter.all(),
  };

  root.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    KEYS[event.key]();
    soon();
    event.preventDefault();
    event.stopPropagation(); // or the notebook would take the key
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // scrolls the notebook
    painter.zoom(1.0015 ** event.deltaY, event.offsetX);
    soon();
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("dblclick", () => {
    painter.all();
    soon();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.offsetX, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag && (drag.moved || Math.abs(event.offsetX - drag.x) > 3)) {
      painter.pan(drag.x - event.offsetX);
      drag = { x: event.offsetX, moved: true };
      soon();
    } else if (!drag) {
      const item = painter.at(event.offsetX, event.offsetY);
      says.value = item < 0 ? USAGE : painter.says(item);
      canvas.style.cursor = item < 0 ? "grab" : "pointer";
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.moved;
    drag = null;
    if (!clicked) return;
    const item = painter.at(event.offsetX, event.offsetY);
    model.set("chosen", item < 0 ? -1 : painter.data.requests[item]);
    model.save_changes();
  });
  canvas.addEventListener("lostpointercapture", () => (drag = null));

  // A canvas does not follow CSS by itself.
  const themes = new MutationObserver(recolour);
  themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  const system = matchMedia("(prefers-color-scheme: dark)");
  system.addEventListener("change", recolour);
  const sizes = new ResizeObserver(() => painter.resize() && soon());
  model.on("change:revision", take);
  model.on("change:chosen", choose);
  painter.recolour();
  take();
  // Where the style sheet comes after the module, the colours are there only now.
  requestAnimationFrame(recolour);
  sizes.observe(root);
  return () => {
    cancelAnimationFrame(waiting);
    themes.disconnect();
    sizes.disconnect();
    system.removeEventListener("change", recolour);
    model.off("change:revision", take);
    model.off("change:chosen", choose);
  };
}

export default { render };
