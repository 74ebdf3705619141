// Charts that belong together: one cursor, one range of steps. Drag to look closer, double-click or Escape to step back.
class Group {
  constructor() {
    Object.assign(this, { charts: [], marks: [], signs: [], restarts: [], whole: [0, 1], zoom: null, step: null, heard: [] });
    Object.assign(this, { unit: "step", smooth: 0, hidden: new Set(), marked: null, legend: null });
  }

  get range() {
    return this.zoom || this.whole;
  }

  show({ marks = [], signs = [], restarts = [], unit = "step" }, whole) {
    Object.assign(this, { marks, signs, restarts, unit, whole });
  }

  join(chart) {
    this.charts.push(chart);
    const { svg } = chart;
    let from = null;
    const stepAt = (event) => {
      const [low, high] = this.range;
      const pixel = event.clientX - svg.getBoundingClientRect().left;
      return Math.min(Math.max(chart.placeX.back(pixel), low), high);
    };
    svg.addEventListener("pointerdown", (event) => {
      if (event.button || !chart.placeX) return;
      from = stepAt(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (!chart.placeX) return;
      const step = stepAt(event);
      chart.pointed?.(event);
      this.point(Math.round(step));
      if (from !== null) this.choose(from, step);
    });
    svg.addEventListener("pointerup", (event) => {
      if (!chart.placeX) return;
      const step = stepAt(event);
      if (from !== null && Math.abs(chart.placeX(step) - chart.placeX(from)) > 6) {
        this.look([Math.min(from, step), Math.max(from, step)]);
      }
      from = null;
      this.choose(0, 0);
    });
    svg.addEventListener("pointercancel", () => { from = null; this.choose(0, 0); });
    svg.addEventListener("pointerleave", () => {
      if (from !== null) return;
      chart.pointed?.(null);
      this.point(null);
    });
    svg.addEventListener("dblclick", () => this.look(null));
    svg.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const [low, high] = this.range;
    const part = (high - low) / 4;
    const moves = {
      "+": [low + part, high - part], "-": [low - part * 2, high + part * 2],
      ArrowLeft: [low - part, high - part], ArrowRight: [low + part, high + part], Escape: null,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.look(moves[event.key]);
  }

  choose(from, to) {
    for (const { window: chosen, placeX } of this.charts) {
      if (!chosen) continue;
      chosen.setAttribute("x", placeX(Math.min(from, to)));
      chosen.setAttribute("width", Math.abs(placeX(to) - placeX(from)));
    }
  }

  point(step) {
    this.step = step;
    this.charts.forEach((chart) => chart.point(step));
  }

  look(range) {
    const [low, high] = this.whole;
    let next = range && [Math.max(range[0], low), Math.min(range[1], high)];
    if (next && (next[1] - next[0] >= high - low || next[1] <= next[0])) next = null;
    if (next && next[1] - next[0] < 2) next = [next[0] - 1, next[0] + 1];
    this.zoom = next;
    this.redraw();
    this.heard.forEach((hear) => hear(next));
  }

  redraw() {
    this.charts.forEach((chart) => chart.draw());
  }
}
