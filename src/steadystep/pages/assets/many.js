// Many runs in one picture: a legend for all charts, parallel coordinates over what was set, a table that sorts.
const MOST_TOLD = 4;

class Legend {
  constructor(box, runs, group) {
    Object.assign(this, { box, runs, group });
    const all = make("button", { class: "quiet", type: "button", text: "all" });
    const none = make("button", { class: "quiet", type: "button", text: "none" });
    all.addEventListener("click", () => this.hide([]));
    none.addEventListener("click", () => this.hide(runs.map(({ name }) => name)));
    this.keys = runs.map((run) => this.key(run));
    box.replaceChildren(make("div", { class: "keys" }, ...this.keys), make("div", { class: "tools-of" }, all, none));
  }

  key({ name, look }) {
    const line = make("svg", { class: "swatch", viewBox: "0 0 26 8", "aria-hidden": "true" },
      make("line", { class: `curve ${look}`, x1: 0, x2: 26, y1: 4, y2: 4 }));
    const key = make("button", { class: "key", type: "button", "aria-pressed": "true", "data-name": name, title: "click: show or hide; double-click: only this one" },
      line, make("span", { text: name }));
    key.addEventListener("click", () => {
      const hidden = new Set(this.group.hidden);
      if (!hidden.delete(name)) hidden.add(name);
      this.hide([...hidden]);
    });
    key.addEventListener("dblclick", () => this.hide(this.runs.map((run) => run.name).filter((other) => other !== name)));
    const mark = (marked) => () => this.mark(marked);
    key.addEventListener("pointerenter", mark(name));
    key.addEventListener("pointerleave", mark(null));
    return key;
  }

  hide(names) {
    this.group.hidden = new Set(names);
    this.keys.forEach((key) => key.setAttribute("aria-pressed", String(!this.group.hidden.has(key.dataset.name))));
    this.group.redraw();
  }

  mark(name) {
    if (this.group.marked === name) return;
    this.group.marked = name;
    this.keys.forEach((key) => key.classList.toggle("marked", key.dataset.name === name));
    this.group.redraw();
  }

  // The values of a few; of many the one next to the pointer, and in the other charts the same run.
  told(chart, values, step) {
    const lines = chart.panel.lines.map((line, i) => ({ line, text: values[i] })).filter(({ line }) => line.name && !chart.isHidden(line));
    if (lines.length <= MOST_TOLD) return lines.map(({ line, text }) => ` · ${line.name} ${text}`).join("");
    const near = (chart.pointerY ?? null) === null ? null : chart.nearest(step);
    const name = near || this.group.marked;
    const found = lines.find(({ line }) => line.name === name);
    return found ? ` · ${name} ${found.text}` : "";
  }
}

class Parallel {
  constructor(box, data, group) {
    Object.assign(this, { box, group, runs: data.runs, axes: data.parallel, height: 240, brushes: new Map() });
    this.svg = make("svg", { height: this.height, role: "img", "aria-label": "settings and result of each run" });
    this.told = make("span", { class: "at" });
    const clear = make("button", { class: "quiet", type: "button", text: "clear ranges" });
    clear.addEventListener("click", () => { this.brushes.clear(); this.sift(); });
    const plot = make("div", { class: "plot wide" }, this.svg);
    box.replaceChildren(make("header", {}, make("h3", { text: "Settings and result" }),
      make("span", { class: "soft", text: "drag along an axis to keep the runs in that range" }), this.told, make("span", { class: "tools-of" }, clear)), plot);
    this.plot = plot;
    group.charts.push(this);
    new ResizeObserver(() => this.draw()).observe(plot);
    this.svg.addEventListener("pointerdown", (event) => this.drag(event));
  }

  point() {}

  scale(axis) {
    const [top, bottom] = [30, this.height - 14];
    if (axis.kind === "word") {
      const words = [...new Set(axis.values)].sort();
      const place = (value) => (words.length < 2 ? (top + bottom) / 2 : bottom - (words.indexOf(value) / (words.length - 1)) * (bottom - top));
      return { place, ticks: words.slice(0, 12).map((word) => [place(word), word]) };
    }
    const known = axis.values.filter((value) => value !== null);
    const log = axis.kind === "log";
    const [low, high] = [Math.min(...known), Math.max(...known)];
    if (sayTick(low) === sayTick(high)) { // as far apart as they read: not at all
      const place = () => (top + bottom) / 2;
      place.back = () => low;
      return { place, ticks: [[place(), sayTick(low)]] };
    }
    const place = scaleOf(low, high, bottom, top, log);
    const ticks = [low, ...(log ? logTicks : linearTicks)(low, high, 4).filter((value) => value > low && value < high), high];
    return { place, ticks: ticks.map((value) => [place(value), sayTick(value)]).filter(([y], i, all) => !i || all[i - 1][0] - y > 11) };
  }

  draw() {
    const width = Math.max(this.plot.clientWidth, this.axes.length * 96);
    if (!this.plot.clientWidth) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.style.width = `${width}px`;
    this.places = this.axes.map((_, i) => 60 + (i * (width - 120)) / Math.max(this.axes.length - 1, 1));
    this.scales = this.axes.map((axis) => this.scale(axis));
    const { marked, hidden } = this.group;
    const lines = this.runs.map(({ name, look }, r) => {
      const points = this.axes.map((axis, i) => [this.places[i], axis.values[r] === null ? this.height - 2 : this.scales[i].place(axis.values[r])]);
      const state = hidden.has(name) ? " out" : marked && marked !== name ? " faded" : "";
      const path = make("path", { class: `curve ${look}${state}`, d: `M${points.map((point) => point.map((v) => v.toFixed(1)).join(" ")).join("L")}`, "data-name": name });
      path.addEventListener("pointerenter", () => {
        this.group.legend.mark(name);
        this.told.textContent = name;
      });
      path.addEventListener("pointerleave", () => {
        this.group.legend.mark(null);
        this.told.textContent = "";
      });
      return path;
    });
    this.svg.replaceChildren(...lines, ...this.axes.flatMap((axis, i) => this.axis(axis, i)));
  }

  axis({ name }, i) {
    const x = this.places[i];
    const anchor = i ? ["start", 6] : ["end", -6];
    const drawn = [make("line", { class: "pillar", x1: x, x2: x, y1: 26, y2: this.height - 10 }),
      make("text", { class: "axis-title", x, y: 14, "text-anchor": "middle", text: name.length > 22 ? `…${name.slice(-21)}` : name })];
    for (const [y, text] of this.scales[i].ticks) drawn.push(make("text", { x: x + anchor[1], y: y + 3.5, "text-anchor": anchor[0], text: String(text).slice(0, 16) }));
    const brush = this.brushes.get(i);
    if (brush) drawn.push(make("rect", { class: "chosen", x: x - 7, width: 14, y: brush[0], height: brush[1] - brush[0] }));
    return drawn;
  }

  drag(event) {
    const frame = this.svg.getBoundingClientRect();
    const i = this.places.findIndex((x) => Math.abs(event.clientX - frame.left - x) < 16);
    if (i < 0 || event.button) return;
    event.preventDefault();
    const from = event.clientY - frame.top;
    this.svg.setPointerCapture(event.pointerId);
    const move = (moved) => {
      const to = moved.clientY - frame.top;
      if (Math.abs(to - from) > 4) this.brushes.set(i, [Math.min(from, to), Math.max(from, to)]);
      else this.brushes.delete(i);
      this.sift();
    };
    this.svg.addEventListener("pointermove", move);
    this.svg.addEventListener("pointerup", () => this.svg.removeEventListener("pointermove", move), { once: true });
  }

  sift() {
    const out = this.runs.filter((_, r) => [...this.brushes].some(([i, [low, high]]) => {
      const value = this.axes[i].values[r];
      const y = value === null ? Infinity : this.scales[i].place(value);
      return y < low || y > high;
    }));
    this.group.legend.hide(out.map(({ name }) => name));
  }
}

// A click on a heading sorts by it, a second one the other way round; cells without a value come last.
function startSorting(table) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    body.append(...[...body.rows].sort((a, b) => ordered(value(a), value(b), down)));
  }));
}

function ordered(a, b, down) {
  const [x, y] = [a, b].map((one) => (one === "" || one === "–" || one === null || one === undefined ? NaN : Number(one)));
  if (!Number.isNaN(x) || !Number.isNaN(y)) {
    if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
    return down ? y - x : x - y;
  }
  const empty = (one) => one === "" || one === "–" || one === null || one === undefined;
  if (empty(a) !== empty(b)) return empty(a) ? 1 : -1;
  return (down ? -1 : 1) * String(a ?? "").localeCompare(String(b ?? ""), "en", { numeric: true });
}
