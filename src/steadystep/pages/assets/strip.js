// The incidents of a run, once for all charts: it stays in view while one scrolls through them. One lane per rank below.
const NEAR_PIXELS = 16;

class Strip extends Track {
  constructor(box, group) {
    super(group, 22);
    this.box = box;
    this.svg.removeAttribute("tabindex"); // its marks are links of their own
    this.svg.setAttribute("aria-hidden", "true");
    this.label = make("span", { class: "label" });
    this.marks = make("div", { class: "strip-marks" });
    this.plot.append(this.marks);
    box.replaceChildren(this.label, this.plot);
    this.start();
  }

  draw() {
    const { marks, restarts } = this.group;
    this.box.hidden = !marks.length && !restarts.length;
    const ranks = [...new Set(marks.flatMap((mark) => mark.ranks || []))].sort((a, b) => a - b).slice(0, 16);
    this.height = 22 + (ranks.length ? 12 * ranks.length + 4 : 0);
    if (this.box.hidden || !this.frame(4, this.height)) return;
    this.label.textContent = ranks.length ? "Incidents, by rank" : "Incidents";
    const { left, right } = this.edge;
    const lanes = ranks.flatMap((rank, i) => {
      const y = 28 + 12 * i;
      return [
        make("line", { class: "gridline", x1: left, x2: right, y1: y, y2: y }),
        make("text", { x: left - 6, y: y + 3.5, "text-anchor": "end", text: `rank ${rank}` }),
        ...this.inView().filter((mark) => mark.ranks.includes(rank)).map((mark) =>
          make("rect", { class: `lane ${mark.severity}`, x: this.placeX(mark.step) - 3, y: y - 3, width: 6, height: 6 })),
      ];
    });
    this.svg.replaceChildren(make("line", { class: "gridline", x1: left, x2: right, y1: 11, y2: 11 }), ...lanes, ...this.pointer());
    this.marks.replaceChildren(...this.clusters().map((cluster) => this.link(cluster)));
    this.pointCross(this.group.step);
  }

  inView() {
    const [first, last] = this.group.range;
    return this.group.marks.filter(({ step }) => step >= first && step <= last);
  }

  // Marks that would cover each other become one, as grave as the gravest.
  clusters() {
    const made = [];
    const order = ["info", "warn", "act", "critical"];
    for (const mark of this.inView()) {
      const last = made[made.length - 1];
      if (last && this.placeX(mark.step) - last.x < NEAR_PIXELS) {
        last.all.push(mark);
        if (order.indexOf(mark.severity) > order.indexOf(last.mark.severity)) last.mark = mark;
      } else made.push({ mark, x: this.placeX(mark.step), all: [mark] });
    }
    return made;
  }

  link({ mark, x, all }) {
    const times = mark.times > 1 ? `, ${mark.times} times` : "";
    const more = all.length > 1 ? ` and ${all.length - 1} more` : "";
    const title = `${mark.cause} at step ${sayStep(mark.step)}${times}${more}`;
    const node = make("a", { class: `mark-top ${mark.severity}`, href: `#case-${mark.step}`, "data-step": mark.step, title, "aria-label": title });
    if (all.length > 1) node.textContent = all.length < 100 ? all.length : "99+";
    node.style.left = `${x}px`;
    node.addEventListener("click", (event) => {
      event.preventDefault();
      openCase(mark.step);
    });
    return node;
  }

  point(step) {
    this.pointCross(step);
  }
}
