// One panel: axes, curves, incidents. It is drawn anew for every change; a few thousand points take a millisecond or two.
let clips = 0;

class Chart {
  constructor(box, panel, group, { height = 170 } = {}) {
    Object.assign(this, { box, group, height, log: panel.log, chosen: null });
    this.clip = `clip-${(clips += 1)}`;
    this.header = make("header");
    this.plot = make("div", { class: "plot" });
    this.svg = make("svg", { height, role: "img", tabindex: "0" });
    this.plot.append(this.svg);
    box.replaceChildren(this.header, this.plot);
    this.give(panel);
    group.join(this);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  give(panel) {
    this.panel = panel;
    this.svg.setAttribute("aria-label", `${panel.title} by step`);
    const title = make("h3", { text: panel.title });
    this.values = panel.lines.map(() => make("b"));
    const keys = panel.lines.map((line, i) => line.name &&
      make("span", { class: `key ${this.look(line)}` }, make("i"), make("span", { text: line.name }), this.values[i]));
    this.at = make("span", { class: "at" });
    const button = make("button", { class: "quiet", type: "button", "aria-pressed": String(this.log), text: "log" });
    button.addEventListener("click", () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", String(this.log));
      this.draw();
    });
    this.header.replaceChildren(title, ...keys.filter(Boolean), this.at, button);
    this.point(this.group.step);
  }

  look(line) {
    const behind = this.panel.lines.some(({ role }) => role === `${line.role} typical`);
    return behind ? `${line.role} behind` : line.role;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const { height, svg, panel } = this;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const edge = { left: 46, right: width - 8, top: 12, bottom: height - 20 };
    const range = this.group.range;
    const seen = valuesOf(panel.lines, range, this.log) || (this.log ? [0.1, 10] : [0, 1]);
    this.placeX = scaleOf(range[0], range[1], edge.left, edge.right, false);
    const placeY = scaleOf(seen[0], seen[1], edge.bottom, edge.top, this.log);
    this.edge = edge;
    const clip = document.createElementNS(SVG, "clipPath");
    clip.id = this.clip;
    clip.append(make("rect", { x: edge.left, y: 0, width: Math.max(edge.right - edge.left, 0), height: edge.bottom + 1 }));
    const inside = make("g", { "clip-path": `url(#${this.clip})` });
    inside.append(...this.bands(), ...this.curves(range, placeY), ...this.marks());
    this.cross = make("line", { class: "cross", y1: edge.top, y2: edge.bottom, x1: -9, x2: -9 });
    this.window = make("rect", { class: "chosen", y: edge.top, height: edge.bottom - edge.top, width: 0 });
    svg.replaceChildren(clip, ...this.axes(range, seen, placeY, width), inside, this.window, this.cross);
    this.point(this.group.step);
  }

  axes(range, seen, placeY, width) {
    const { left, right, bottom } = this.edge;
    const drawn = [];
    for (const value of (this.log ? logTicks : linearTicks)(seen[0], seen[1], this.height < 150 ? 3 : 5)) {
      const y = placeY(value);
      drawn.push(make("line", { class: "gridline", x1: left, x2: right, y1: y, y2: y }));
      drawn.push(make("text", { x: left - 6, y: y + 3.5, "text-anchor": "end", text: sayTick(value) }));
    }
    for (const step of linearTicks(range[0], range[1], Math.max(2, width / 110))) {
      if (!Number.isInteger(step)) continue;
      const text = { x: this.placeX(step), y: bottom + 15, "text-anchor": "middle", text: sayTick(step) };
      drawn.push(make("text", text));
    }
    return drawn;
  }

  bands() {
    const { top, bottom } = this.edge;
    const grave = this.group.signs.filter(({ severity }) => severity !== "info");
    return grave.map(({ step, until, severity }) => {
      const [x, end] = [this.placeX(step), this.placeX(until ?? this.group.whole[1])];
      return make("rect", { class: `sign ${severity}`, x, y: top, width: Math.max(end - x, 1), height: bottom - top });
    });
  }

  curves(range, placeY) {
    const { top, bottom } = this.edge;
    const drawn = [];
    for (const line of this.panel.lines) {
      const d = pathOf(line, range, this.placeX, placeY, this.log);
      drawn.push(make("path", { class: `curve ${this.look(line)}`, d }));
      if (line.role === "held-out" && line.x.length <= 60) {
        line.y.forEach((value, i) => {
          if (value === null || (this.log && value <= 0)) return;
          drawn.push(make("circle", { class: "dots held-out", cx: this.placeX(line.x[i]), cy: placeY(value), r: 2.2 }));
        });
      }
      for (const [step] of line.bad) {
        const x = this.placeX(step);
        drawn.push(make("path", { class: "bad", d: `M${x - 3} ${top - 3}l6 6m0 -6l-6 6` }));
      }
    }
    for (const step of this.panel.rug) {
      const x = this.placeX(step);
      drawn.push(make("line", { class: "rug", x1: x, x2: x, y1: bottom - 5, y2: bottom }));
    }
    return drawn;
  }

  marks() {
    const { top, bottom } = this.edge;
    const drawn = [];
    for (const step of this.group.restarts) {
      const x = this.placeX(step);
      drawn.push(make("line", { class: "restart", x1: x, x2: x, y1: top, y2: bottom }));
    }
    for (const mark of this.group.marks) {
      const x = this.placeX(mark.step);
      drawn.push(make("line", { class: `mark ${mark.severity}`, x1: x, x2: x, y1: top, y2: bottom }));
      const dot = make("circle", { class: `mark-top ${mark.severity}`, cx: x, cy: top - 5, r: 4.5, "data-step": mark.step });
      const title = document.createElementNS(SVG, "title");
      title.textContent = `${mark.cause} at step ${sayStep(mark.step)}${mark.times > 1 ? `, ${mark.times} times` : ""}`;
      dot.append(title);
      dot.addEventListener("click", () => openCase(mark.step));
      drawn.push(dot);
    }
    return drawn;
  }

  point(step) {
    if (step === null || !this.placeX) {
      this.values.forEach((node) => (node.textContent = ""));
      this.at.textContent = "";
      this.cross?.classList.add("off");
      return;
    }
    this.panel.lines.forEach((line, i) => {
      const at = nearest(line, step);
      const wrong = line.bad.find(([bad]) => bad === line.x[at]);
      this.values[i].textContent = at < 0 ? "" : wrong ? wrong[1] : say(line.y[at]);
    });
    this.at.textContent = `step ${sayStep(step)}`;
    this.cross.classList.remove("off");
    this.cross.setAttribute("x1", this.placeX(step));
    this.cross.setAttribute("x2", this.placeX(step));
  }
}
