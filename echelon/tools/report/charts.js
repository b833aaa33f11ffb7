// Reading, smoothing and zooming. Everything the page says can be read without it.

const SVG = "http://www.w3.org/2000/svg";
const SMOOTH = 0.9; // weight of the previous value in an exponential mean
const states = new Map(); // options chosen by the user, by figure; kept when the page is refreshed
let dragging = false;

const element = (name, attributes, parent) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent ? parent.appendChild(made) : made;
};
const figure = value => {
  if (value === null || value === undefined) return "nan";
  if (value && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)) return value.toExponential(2);
  if (Number.isInteger(value) || Math.abs(value) >= 9999.5) return (Math.round(value) || 0).toLocaleString("en-US"); // no -0
  return String(Number(value.toPrecision(4)));
};

// ---- scales, as figures/curves.py has them ----

const scaleFor = (values, log, zero) => {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (log) return { low: low / 1.1, high: high * 1.1, log };
  if (zero && low >= 0) low = 0;
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) {
    const reach = Math.abs(high) / 20 || 1, top = high > 0 && high <= 1 && high + reach > 1 ? 1 : high + reach;
    return { low: zero && low === 0 ? low : low - reach, high: top, log };
  }
  return { low, high, log };
};
const part = (scale, value) => scale.log
  ? Math.log(Math.max(value, scale.low) / scale.low) / Math.log(scale.high / scale.low)
  : (value - scale.low) / (scale.high - scale.low);
const ticks = (scale, count = 5) => {
  if (scale.log) {
    const powers = [];
    for (let power = Math.ceil(Math.log10(scale.low) - 1e-9); power <= Math.log10(scale.high) + 1e-9; power++) powers.push(10 ** power);
    if (powers.length >= 2) return powers.filter((_, place) => place % Math.ceil(powers.length / count) === 0);
    return [0, 1, 2, 3, 4].map(place => scale.low * (scale.high / scale.low) ** (place / 4));
  }
  const raw = (scale.high - scale.low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [[1, 2 ** .5], [2, 10 ** .5], [5, 50 ** .5], [10, 11]].find(([, most]) => raw < most * power)[0];
  const found = [];
  for (let place = Math.ceil(scale.low / step - 1e-9); place <= scale.high / step + 1e-9; place++) found.push(step * place);
  return found;
};

const labelled = scale => { // labels with the number of digits needed to distinguish them
  const values = ticks(scale);
  const least = Math.min(...values.slice(1).map((value, place) => value - values[place]));
  const most = Math.max(...values.map(Math.abs)), digits = Math.max(0, -Math.floor(Math.log10(least) + 1e-9));
  const plain = scale.log || !Number.isFinite(least) || !(most >= 1e-4 && most < 1e9) || digits > 6;
  const style = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return values.map(value => [value, plain ? figure(value) : (value || 0).toLocaleString("en-US", style)]);
};

// ---- one chart ----

class Chart {
  constructor(figure_) {
    this.figure = figure_;
    this.data = JSON.parse(figure_.querySelector("script.data").textContent);
    [this.width, this.height, this.margin] = this.data.size;
    this.canvas = figure_.querySelector(".canvas");
    this.field = figure_.querySelector(".field");
    this.paths = [...this.field.querySelectorAll(".curve")];
    this.dots = new Map(this.paths.map(path => [path, path.nextElementSibling]).filter(([, next]) => next?.matches(".dots")));
    this.readout = figure_.querySelector(".readout");
    this.said = [...this.readout.childNodes].map(node => node.cloneNode(true));
    this.marks = { again: this.places(".again line"), gaps: this.places(".gaps line") };
    this.top = element("g", { class: "top" }, this.canvas);
    this.across = this.whole();
    this.from = null; // where the pointer was pressed
    if (!states.has(figure_.id)) states.set(figure_.id, { smooth: false, log: this.data.log, range: null, cursor: null });
    this.state = states.get(figure_.id);
    this.listen();
    this.show();
  }

  whole() {
    return { low: this.data.across[0], high: this.data.across[1], log: false };
  }

  places(selector) { // where marks are on the axis, so that they move with it
    const whole = this.whole();
    return [...this.canvas.querySelectorAll(selector)].map(line =>
      ({ line, x: whole.low + parseFloat(line.getAttribute("x1")) / 100 * (whole.high - whole.low) }));
  }

  listen() {
    const tools = this.figure.querySelector(".tools");
    tools.hidden = false;
    tools.addEventListener("click", event => this.use(event.target.dataset.tool));
    this.canvas.addEventListener("pointermove", event => this.move(event));
    this.canvas.addEventListener("pointerleave", () => { if (this.from === null) this.point(null); });
    this.canvas.addEventListener("pointerdown", event => this.press(event));
    this.canvas.addEventListener("pointerup", event => this.release(event));
    this.canvas.addEventListener("pointercancel", () => this.drop());
    this.canvas.addEventListener("dblclick", () => this.use("all"));
    this.canvas.addEventListener("keydown", event => this.key(event));
  }

  use(tool) {
    if (tool === "smooth" || tool === "log") this.state[tool] = !this.state[tool];
    else if (tool === "all") this.state.range = null;
    else return;
    this.show();
  }

  // -- drawing --

  show() {
    const all = this.whole(), range = this.state.range;
    this.across = range ? { low: range[0], high: range[1], log: false } : all;
    const values = this.data.series.flatMap(series => this.seen(series));
    if (!values.length) { this.state.range = null; if (range) this.show(); return; }
    const log = this.state.log && values.every(value => value > 0);
    this.up = scaleFor(values, log, this.data.zero);
    this.data.series.forEach((series, place) => this.curve(series, this.paths[place]));
    this.frame();
    this.pressed("smooth", this.state.smooth);
    this.pressed("log", log);
    this.tool("all").disabled = !range;
    this.point(this.state.cursor);
  }

  seen(series) {
    const { low, high } = this.across;
    return series.y.filter((y, place) => y !== null && series.x[place] >= low && series.x[place] <= high);
  }

  curve(series, path) {
    path.setAttribute("d", this.line(series.x, series.y));
    const dots = this.dots.get(path);
    if (dots) dots.setAttribute("d", this.line(series.x, series.y).replaceAll("L", "M").replaceAll(/M([^M]+)/g, "M$1L$1"));
    const smooth = this.state.smooth && !series.pale;
    path.classList.toggle("raw", smooth);
    let over = path.nextElementSibling?.matches(".smooth") ? path.nextElementSibling : null;
    if (!smooth) { if (over) over.remove(); return; }
    if (!over) {
      over = path.cloneNode();
      over.classList.remove("raw");
      over.classList.add("smooth");
      path.after(over);
    }
    over.setAttribute("d", this.line(series.x, smoothed(series.y)));
  }

  line(xs, ys) {
    let found = "", pen = false;
    for (let place = 0; place < xs.length; place++) {
      if (ys[place] === null) { pen = false; continue; }
      const at = `${(this.width * part(this.across, xs[place])).toFixed(2)} ${this.down(ys[place]).toFixed(2)}`;
      found += pen ? `L${at}` : `M${at}L${at}`;
      pen = true;
    }
    return found;
  }

  down(value) {
    return this.height - this.margin - (this.height - 2 * this.margin) * part(this.up, value);
  }

  frame() {
    const grid = this.canvas.querySelector(".grid"), scale = this.figure.querySelector(".scale");
    const upward = labelled(this.up).map(([value, text]) => [this.down(value), text]);
    grid.replaceChildren(...upward.map(([y]) => element("line", { x1: "0%", x2: "100%", y1: y, y2: y })));
    scale.replaceChildren(...upward.map(([y, text]) => label(text, "top", `${y}px`)));
    const sideways = labelled(this.across).map(([value, text]) => [100 * part(this.across, value), text]);
    this.figure.querySelector(".ticks").replaceChildren(...sideways.map(([x, text]) =>
      label(text, "left", `${x}%`, x < 4 ? "first" : x > 96 ? "last" : "")));
    for (const { line, x } of [...this.marks.again, ...this.marks.gaps]) {
      const at = 100 * part(this.across, x);
      line.setAttribute("x1", `${at}%`);
      line.setAttribute("x2", `${at}%`);
      line.style.display = at < -0.01 || at > 100.01 ? "none" : "";
    }
  }

  tool(name) { return this.figure.querySelector(`[data-tool="${name}"]`); }
  pressed(name, pressed) { this.tool(name).setAttribute("aria-pressed", String(pressed)); }

  // -- reading --

  value(event) {
    const box = this.canvas.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    return this.across.low + share * (this.across.high - this.across.low);
  }

  move(event) {
    if (this.from !== null) this.stretch(this.value(event));
    this.point(this.value(event));
  }

  point(x) {
    this.state.cursor = x;
    this.top.querySelectorAll(".cursor, .dot").forEach(each => each.remove());
    if (x === null) { this.readout.replaceChildren(...this.said.map(node => node.cloneNode(true))); return; }
    const near = this.data.series.map(series => nearest(series.x, x));
    const lead = this.data.series.map((series, place) => series.x[near[place]])
      .reduce((best, each) => Math.abs(each - x) < Math.abs(best - x) ? each : best);
    const at = `${100 * part(this.across, lead)}%`;
    element("line", { class: "cursor", x1: at, x2: at, y1: 0, y2: this.height }, this.top);
    const words = [document.createTextNode(`${this.data.x} ${figure(lead)}`)];
    this.data.series.forEach((series, place) => {
      const value = series.y[near[place]];
      if (series.pale) return;
      words.push(" ", this.word(series.name, this.paths[place], value));
      const own = 100 * part(this.across, series.x[near[place]]);
      if (value !== null && own >= 0 && own <= 100)
        element("circle", { class: `dot ${kind(this.paths[place])}`, cx: `${own}%`, cy: this.down(value), r: 3.5 }, this.top);
    });
    this.readout.replaceChildren(...words);
  }

  word(name, path, value) {
    const word = document.createElement("span"), key = document.createElement("i"), strong = document.createElement("b");
    key.className = kind(path);
    strong.textContent = figure(value);
    word.append(key, `${name} `, strong);
    return word;
  }

  // -- zooming --

  press(event) {
    if (event.button !== 0 || event.pointerType === "touch") return; // a finger reads and scrolls
    this.from = this.value(event);
    dragging = true;
    this.canvas.setPointerCapture(event.pointerId);
  }

  stretch(to) {
    const [low, high] = [Math.min(this.from, to), Math.max(this.from, to)].map(x => 100 * part(this.across, x));
    this.top.querySelectorAll(".part").forEach(each => each.remove());
    element("rect", { class: "part", x: `${low}%`, y: 0, width: `${high - low}%`, height: this.height }, this.top);
  }

  release(event) {
    if (this.from === null) return;
    const to = this.value(event), [low, high] = [Math.min(this.from, to), Math.max(this.from, to)];
    const wide = (high - low) / (this.across.high - this.across.low);
    this.drop();
    if (wide > 0.015) this.zoom(low, high);
  }

  drop() {
    this.from = null;
    dragging = false;
    this.top.querySelectorAll(".part").forEach(each => each.remove());
  }

  zoom(low, high) {
    const all = this.whole();
    low = Math.max(low, all.low);
    high = Math.min(high, all.high);
    this.state.range = high - low >= all.high - all.low ? null : [low, high];
    this.show();
  }

  key(event) {
    const xs = this.data.series[0].x, span = this.across.high - this.across.low;
    const cursor = this.state.cursor ?? this.across.high, place = nearest(xs, cursor), stride = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: place - stride, ArrowRight: place + stride, Home: 0, End: xs.length - 1 }[event.key];
    if (to !== undefined) this.point(xs[Math.min(xs.length - 1, Math.max(0, to))]);
    else if (event.key === "+") this.zoom(cursor - span / 4, cursor + span / 4);
    else if (event.key === "-") this.zoom(cursor - span, cursor + span);
    else if (event.key === "Escape") this.use("all");
    else return;
    event.preventDefault();
  }
}

const kind = path => [...path.classList].find(name => /^[sk]-/.test(name)) || "";
const label = (text, side, where, name = "") => {
  const made = document.createElement("span");
  made.textContent = text;
  made.style[side] = where;
  made.className = name;
  return made;
};
const nearest = (xs, x) => {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
};
const smoothed = ys => {
  let sum = 0, weight = 0;
  return ys.map(y => {
    if (y === null) return null;
    sum = SMOOTH * sum + (1 - SMOOTH) * y;
    weight = SMOOTH * weight + (1 - SMOOTH);
    return sum / weight; // the first values count fully
  });
};

// ---- figures that describe the element under the pointer ----

const speak = picture => {
  const said = document.createElement("p");
  said.className = "said";
  said.setAttribute("role", "status");
  picture.closest(".gantt").after(said);
  picture.addEventListener("pointerover", event => {
    const title = event.target.querySelector(":scope > title");
    said.textContent = event.target !== picture && title ? title.textContent : "";
  });
  picture.addEventListener("pointerleave", () => { said.textContent = ""; });
};

const enliven = root => {
  root.querySelectorAll("[data-script]").forEach(each => { each.hidden = false; });
  root.querySelectorAll(".said-by").forEach(speak);
  root.querySelectorAll("figure.chart").forEach(each => new Chart(each));
};
