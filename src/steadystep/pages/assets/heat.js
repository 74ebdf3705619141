// All layers over time, on the steps and the zoom of the charts. A column lasts until the next one begins.
const RAMP = [[22, 33, 62], [31, 84, 125], [46, 139, 139], [142, 190, 126], [246, 214, 108], [226, 110, 52]];
const ROW = 14;

function shade(part) {
  const at = Math.min(Math.max(part, 0), 1) * (RAMP.length - 1);
  const [i, rest] = [Math.min(Math.floor(at), RAMP.length - 2), at - Math.min(Math.floor(at), RAMP.length - 2)];
  return RAMP[i].map((value, k) => Math.round(value + (RAMP[i + 1][k] - value) * rest));
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}

// Two digits of base 36 for each cell, from "low" to "high".
function unpacked({ rows, low, high }) {
  const one = (digits) => (digits === "  " ? null : low + (parseInt(digits, 36) / 1295) * (high - low));
  return rows.map((row) => Array.from({ length: row.length / 2 }, (_, c) => one(row.slice(2 * c, 2 * c + 2))));
}

class Heat extends Track {
  constructor(box, heats, group) {
    super(group, ROW);
    Object.assign(this, { box, own: false, chosen: heats[0].key });
    this.names = make("ol");
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.plot.prepend(this.canvas);
    this.told = make("span", { class: "at" });
    this.title = make("h3");
    [this.low, this.high] = [make("span"), make("span")];
    this.ramp = make("canvas", { class: "ramp", width: 64, height: 1, "aria-hidden": "true" });
    this.choice = make("span", { class: "choice", role: "group", "aria-label": "what the map shows" });
    const own = make("button", { class: "quiet", type: "button", "aria-pressed": "false", text: "relative to its own median" });
    own.addEventListener("click", () => {
      this.own = !this.own;
      own.setAttribute("aria-pressed", String(this.own));
      this.paint();
    });
    const ends = make("span", { class: "ends" }, this.low, this.ramp, this.high);
    const header = make("header", {}, this.title, this.choice, ends, own, this.told);
    box.replaceChildren(make("div", { class: "panel" }, header), make("div", { class: "grid" }, this.names, this.plot));
    this.give(heats);
    this.start();
  }

  give(heats) {
    this.heats = heats;
    this.data = heats.find(({ key }) => key === this.chosen) || heats[0];
    this.rows = unpacked(this.data);
    this.wrong = new Set(this.data.bad.map(([c, r]) => `${c}/${r}`));
    this.title.textContent = `${this.data.title} by layer`;
    this.svg.setAttribute("aria-label", `${this.data.about} of each layer by ${this.group.unit}`);
    this.names.replaceChildren(...this.data.names.map((name) => make("li", { title: name }, make("bdi", { text: name.replace(/\.weight$/, "") }))));
    this.choice.replaceChildren(...(heats.length < 2 ? [] : heats.map(({ key, title }) => {
      const button = make("button", { class: "quiet", type: "button", text: title, "data-heat": key, "aria-pressed": String(key === this.data.key) });
      button.addEventListener("click", () => {
        this.chosen = key;
        this.give(this.heats);
        this.choice.querySelector(`[data-heat="${key}"]`).focus({ preventScroll: true });
      });
      return button;
    })));
    this.draw();
  }

  draw() {
    const height = this.rows.length * ROW;
    this.height = height + 20;
    if (!this.frame(0, height)) return;
    this.paint();
    this.svg.replaceChildren(...this.stepAxis(), ...this.incidents(), ...this.movers(), ...this.pointer());
    this.pointCross(this.group.step);
  }

  // Steps at which a column begins and ends.
  spanOf(c) {
    const { x, last } = this.data;
    return [x[c], c + 1 < x.length ? x[c + 1] : Math.max(last, x[c] + 1)];
  }

  paint() {
    const { left, right } = this.edge || {};
    if (left === undefined) return;
    const shown = this.own ? this.rows.map((row) => this.centred(row)) : this.rows;
    const sorted = shown.flat().filter((value) => value !== null).sort((a, b) => a - b);
    let [low, high] = [sorted[Math.floor(sorted.length * 0.01)] ?? 0, sorted[Math.ceil(sorted.length * 0.995) - 1] ?? 1];
    if (this.own) [low, high] = [-Math.max(-low, high, 0.5), Math.max(-low, high, 0.5)];
    const dense = window.devicePixelRatio || 1;
    Object.assign(this.canvas, { width: this.edge.width * dense, height: shown.length * ROW * dense });
    this.canvas.style.height = `${shown.length * ROW}px`;
    const context = this.canvas.getContext("2d");
    context.scale(dense, dense);
    this.data.x.forEach((_, c) => {
      const [from, to] = this.spanOf(c).map((step) => Math.min(Math.max(this.placeX(step), left), right));
      if (to <= from) return;
      shown.forEach((row, r) => {
        if (row[c] === null && !this.wrong.has(`${c}/${r}`)) return;
        const colour = this.wrong.has(`${c}/${r}`) ? [214, 30, 62] : shade((row[c] - low) / (high - low || 1));
        context.fillStyle = `rgb(${colour.join(",")})`;
        context.fillRect(Math.floor(from), r * ROW, Math.ceil(to) - Math.floor(from), ROW);
      });
    });
    const ramp = this.ramp.getContext("2d");
    for (let i = 0; i < 64; i += 1) {
      ramp.fillStyle = `rgb(${shade(i / 63).join(",")})`;
      ramp.fillRect(i, 0, 1, 1);
    }
    this.low.textContent = this.own ? `1/${say(10 ** -low)}` : say(10 ** low);
    this.high.textContent = this.own ? `×${say(10 ** high)}` : say(10 ** high);
  }

  centred(row) {
    const middle = median(row);
    return row.map((value) => (value === null ? null : value - middle));
  }

  // The layer that moved first in an incident.
  movers() {
    const [first, last] = this.group.range;
    return this.data.movers.filter(([step]) => step >= first && step <= last).map(([step, row]) => {
      const title = document.createElementNS(SVG, "title");
      title.textContent = `${this.data.names[row]} moved first at step ${sayStep(step)}`;
      const ring = make("circle", { class: "mover", cx: this.placeX(step), cy: row * ROW + ROW / 2, r: 5.5 });
      ring.append(title);
      return ring;
    });
  }

  pointed(event) {
    const frame = this.svg.getBoundingClientRect();
    this.row = event ? Math.floor((event.clientY - frame.top) / ROW) : null;
  }

  point(step) {
    this.pointCross(step);
    const { x, names } = this.data;
    const [r, c] = [this.row ?? null, step === null ? -1 : firstAt(x, step + 0.5) - 1];
    if (r === null || r < 0 || r >= names.length || c < 0) {
      this.told.textContent = "";
      return;
    }
    const value = this.rows[r][c];
    const size = this.wrong.has(`${c}/${r}`) ? "non-finite" : value === null ? "zero or missing" : say(10 ** value);
    const [from, to] = this.spanOf(c);
    this.told.textContent = `${names[r]}: ${size}, step ${sayStep(from)}${to - from > 1 ? ` to ${sayStep(to - 1)}` : ""}`;
  }
}
