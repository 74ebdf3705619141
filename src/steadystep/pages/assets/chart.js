// One panel: axes, curves, what was refused, incidents. It is drawn anew for every change: a millisecond or two.
let clips = 0;

// Whatever has the steps as its horizontal axis: charts, the heat map, the strip of incidents.
class Track {
  constructor(group, height) {
    Object.assign(this, { group, height });
    this.plot = make("div", { class: "plot" });
    this.svg = make("svg", { height, role: "img", tabindex: "0" });
    this.plot.append(this.svg);
  }

  start() {
    this.group.join(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  // The same edges everywhere, so that a step is above itself in all of them.
  frame(top, bottom) {
    const width = this.plot.clientWidth;
    if (!width) return false;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.edge = { left: 46, right: width - 8, top, bottom, width };
    const [low, high] = this.group.range;
    this.placeX = scaleOf(low, high, this.edge.left, this.edge.right, false);
    return true;
  }

  pointer() {
    const { top, bottom } = this.edge;
    this.cross = make("line", { class: "cross off", y1: top, y2: bottom, x1: -9, x2: -9 });
    this.window = make("rect", { class: "chosen", y: top, height: bottom - top, width: 0 });
    return [this.window, this.cross];
  }

  pointCross(step) {
    if (!this.cross) return;
    this.cross.classList.toggle("off", step === null);
    if (step === null) return;
    this.cross.setAttribute("x1", this.placeX(step));
    this.cross.setAttribute("x2", this.placeX(step));
  }

  stepAxis() {
    const { left, right, bottom, width } = this.edge;
    const drawn = [make("text", { x: right, y: bottom + 15, "text-anchor": "end", text: this.group.unit })];
    const free = right - 8 - 6 * this.group.unit.length;
    for (const step of linearTicks(...this.group.range, Math.max(2, width / 110))) {
      const x = this.placeX(step);
      if (!Number.isInteger(step) || x > free - 3 * sayTick(step).length || x < left - 1) continue;
      drawn.push(make("text", { x, y: bottom + 15, "text-anchor": "middle", text: sayTick(step) }));
    }
    return drawn;
  }

  incidents() {
    const { top, bottom } = this.edge;
    const upright = (name, step) => {
      const x = this.placeX(step);
      return make("line", { class: name, x1: x, x2: x, y1: top, y2: bottom });
    };
    return [
      ...this.group.restarts.map((step) => upright("restart", step)),
      ...this.group.marks.map(({ step, severity }) => upright(`mark ${severity}`, step)),
    ];
  }
}

class Chart extends Track {
  constructor(box, panel, group, { height = 170, bare = false } = {}) {
    super(group, height);
    Object.assign(this, { box, bare, log: panel.log, hidden: new Set() });
    this.clip = `clip-${(clips += 1)}`;
    this.header = make("header");
    box.replaceChildren(this.header, this.plot);
    this.give(panel);
    this.start();
  }

  give(panel) {
    this.panel = panel;
    this.svg.setAttribute("aria-label", `${panel.title} by ${this.group.unit}`);
    const told = JSON.stringify([panel.title, panel.lines.map(({ name, role }) => [name, role]), !panel.ghosts?.length]);
    if (told === this.headed) return this.point(this.group.step); // the buttons stay, and with them the focus
    this.headed = told;
    this.values = panel.lines.map(() => make("b"));
    this.refused = make("b");
    this.at = make("span", { class: "at" });
    const keys = this.group.legend ? [] : panel.lines.map((line, i) => line.name && this.key(line.name, this.look(line), this.values[i]));
    if (panel.ghosts?.length) keys.push(this.key("refused", "ghosted", this.refused));
    this.header.replaceChildren(make("h3", { text: panel.title }), ...keys.filter(Boolean), this.at, this.tools());
    return this.point(this.group.step);
  }

  key(name, look, value) {
    const key = make("button", { class: `key ${look}`, type: "button", title: "show or hide" },
      make("i"), make("span", { text: name }), value);
    const tell = () => key.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    key.addEventListener("click", () => {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      tell();
      this.draw();
    });
    tell();
    return key;
  }

  tools() {
    const tool = (text, title, act) => {
      const button = make("button", { class: "quiet", type: "button", text, title });
      button.addEventListener("click", () => act(button));
      return button;
    };
    const log = tool("log", "logarithmic or linear axis", (button) => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", String(this.log));
      this.draw();
    });
    log.setAttribute("aria-pressed", String(this.log));
    if (this.bare) return make("span", { class: "tools-of" }, log);
    return make("span", { class: "tools-of" }, log,
      tool("PNG", "save this chart as a picture", () => savePicture(this)),
      tool("CSV", "save the points of this chart that are in view", () => saveTable(this)));
  }

  isHidden(line) {
    const name = line.of || line.name;
    return this.hidden.has(name) || this.group.hidden.has(name);
  }

  look(line) {
    const behind = this.panel.lines.some(({ role }) => role === `${line.role} typical`);
    return behind ? `${line.role} behind` : line.role;
  }

  // The lines to draw and how: smoothed on top of what it was made from.
  shown() {
    const smooth = this.group.smooth;
    const made = [];
    for (const line of this.panel.lines) {
      if (this.isHidden(line)) continue;
      const look = this.look(line);
      if (!smooth || /held-out|lr|raw|behind/.test(look)) made.push({ line, look });
      else if (/typical|\bc\d/.test(look)) made.push({ line: smoothed(line, smooth), look });
      else made.push({ line, look: `${look} behind` }, { line: smoothed(line, smooth), look: `${look} typical` });
    }
    return made;
  }

  draw() {
    if (!this.frame(this.bare ? 8 : 20, this.height - 20)) return;
    const { edge, panel } = this;
    const range = this.group.range;
    const drawn = this.shown();
    const seen = valuesOf(drawn.map(({ line }) => line), range, this.log) || (this.log ? [0.1, 10] : [0, 1]);
    const placeY = scaleOf(seen[0], seen[1], edge.bottom, edge.top, this.log);
    this.placeY = placeY;
    const clip = document.createElementNS(SVG, "clipPath");
    clip.id = this.clip;
    clip.append(make("rect", { x: edge.left, y: 0, width: Math.max(edge.right - edge.left, 0), height: edge.bottom + 1 }));
    const inside = make("g", { "clip-path": `url(#${this.clip})` });
    inside.append(...this.bands(), ...this.incidents(), ...this.curves(drawn, range, placeY), ...this.ghosts(seen, placeY));
    const title = panel.axis ? panel.axis + (this.log ? " (log)" : "") : "";
    const axis = this.bare ? null : make("text", { class: "axis-title", x: edge.left, y: 10, text: title });
    this.svg.replaceChildren(...[clip, axis, ...this.valueAxis(seen, placeY), ...this.stepAxis(), inside, ...this.pointer()].filter(Boolean));
    this.point(this.group.step);
  }

  valueAxis(seen, placeY) {
    const { left, right } = this.edge;
    return (this.log ? logTicks : linearTicks)(seen[0], seen[1], this.height < 150 ? 3 : 5).flatMap((value) => {
      const y = placeY(value);
      return [
        make("line", { class: "gridline", x1: left, x2: right, y1: y, y2: y }),
        make("text", { x: left - 6, y: y + 3.5, "text-anchor": "end", text: sayTick(value) }),
      ];
    });
  }

  bands() {
    const { top, bottom } = this.edge;
    const grave = this.group.signs.filter(({ severity }) => severity !== "info");
    return grave.map(({ step, until, severity }) => {
      const [x, end] = [this.placeX(step), this.placeX(until ?? this.group.whole[1])];
      return make("rect", { class: `sign ${severity}`, x, y: top, width: Math.max(end - x, 1), height: bottom - top });
    });
  }

  curves(shown, range, placeY) {
    const { top, bottom } = this.edge;
    const drawn = [];
    for (const { line, look } of shown) {
      const faded = this.group.marked && (line.of || line.name) !== this.group.marked ? " faded" : "";
      drawn.push(make("path", { class: `curve ${look}${faded}`, d: pathOf(line, range, this.placeX, placeY, this.log) }));
      if (line.role === "held-out" && line.x.length <= 60) {
        line.y.forEach((value, i) => {
          if (value === null || (this.log && value <= 0)) return;
          drawn.push(make("circle", { class: "dots held-out", cx: this.placeX(line.x[i]), cy: placeY(value), r: 2.2 }));
        });
      }
      for (const [step] of line.role === "without" ? line.bad.slice(0, 1) : line.bad) {
        const x = this.placeX(step);
        drawn.push(make("path", { class: `bad ${this.group.legend ? line.role : ""}`, d: `M${x - 3} ${top - 3}l6 6m0 -6l-6 6` }));
      }
    }
    for (const step of this.panel.rug) {
      const x = this.placeX(step);
      drawn.push(make("line", { class: "rug", x1: x, x2: x, y1: bottom - 5, y2: bottom }));
    }
    return drawn;
  }

  // What the guard refused, hollow: it is in no weight. The axis does not make room for it: beyond it is an arrow.
  ghosts([low, high], placeY) {
    const [first, last] = this.group.range;
    const seen = this.hidden.has("refused") ? [] : (this.panel.ghosts || []).filter(([step]) => step >= first && step <= last);
    return seen.flatMap(([step, value]) => {
      const x = this.placeX(step);
      const { top, bottom, right } = this.edge;
      const outside = value > high || value < low;
      const y = outside ? (value > high ? top + 2 : bottom - 2) : placeY(value);
      const up = value > high ? -1 : 1;
      const d = outside ? `M${x - 4.5} ${y - 4 * up}h9l-4.5 ${8 * up}z` : `M${x - 3.5} ${y}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0`;
      const title = document.createElementNS(SVG, "title");
      title.textContent = `refused at step ${sayStep(step)}: ${say(value)}`;
      const mark = make("path", { class: "ghost", d });
      mark.append(title);
      if (!outside || seen.length > 6) return [mark];
      const end = x > right - 60;
      return [mark, make("text", { class: "ghost-text", x: x + (end ? -8 : 8), y: y + 4, "text-anchor": end ? "end" : "start", text: say(value) })];
    });
  }

  pointed(event) {
    this.pointerY = event ? event.clientY - this.svg.getBoundingClientRect().top : null;
  }

  // The name of the line next to the pointer.
  nearest(step) {
    let [name, best] = [null, 40];
    for (const line of this.panel.lines) {
      const value = line.name && !this.isHidden(line) ? line.y[lastAt(line, step)] : null;
      if (value === null || value === undefined || (this.log && value <= 0)) continue;
      const far = Math.abs(this.placeY(value) - this.pointerY);
      if (far < best) [name, best] = [line.name, far];
    }
    return name;
  }

  point(step) {
    this.pointCross(step);
    if (step === null || !this.placeX) {
      [...this.values, this.refused].forEach((node) => (node.textContent = ""));
      this.at.textContent = "";
      return;
    }
    const pixel = Math.abs(this.placeX.back(1) - this.placeX.back(0));
    const told = this.panel.lines.map((line) => readAt(line, step, pixel));
    told.forEach((text, i) => (this.values[i].textContent = text));
    const ghost = (this.panel.ghosts || []).find(([at]) => Math.abs(at - step) <= 3 * pixel);
    this.refused.textContent = ghost ? say(ghost[1]) : "";
    this.at.textContent = `${this.group.unit} ${sayStep(step)}${this.group.legend ? this.group.legend.told(this, told, step) : ""}`;
  }
}
