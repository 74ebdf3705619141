// All layers over time. One pixel of a small canvas is one cell; the browser enlarges it without smoothing.
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

class Heat {
  constructor(box, data) {
    this.box = box;
    this.own = false;
    this.names = make("ol");
    this.canvas = make("canvas", { role: "img", "aria-label": "gradient norm of each layer by step" });
    this.axis = make("div", { class: "axis" });
    this.told = make("span", { class: "at" });
    this.low = make("span");
    this.high = make("span");
    this.ramp = make("canvas", { class: "ramp", width: 64, height: 1 });
    const button = make("button", { class: "quiet", type: "button", "aria-pressed": "false", text: "relative to its own median" });
    button.addEventListener("click", () => {
      this.own = !this.own;
      button.setAttribute("aria-pressed", String(this.own));
      this.draw();
    });
    const ends = make("span", { class: "ends" }, this.low, this.ramp, this.high);
    const header = make("header", {}, make("h3", { text: "Gradient norm by layer" }), ends, this.told, button);
    const grid = make("div", { class: "grid" }, this.names, this.canvas, this.axis);
    box.replaceChildren(make("div", { class: "panel" }, header), grid);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.told.textContent = ""));
    this.give(data);
  }

  give(data) {
    this.data = data;
    this.names.replaceChildren(...data.names.map((name) => make("li", { title: name }, make("bdi", { text: name }))));
    this.axis.replaceChildren(make("span", { text: `step ${sayStep(data.first)}` }), make("span", { text: sayStep(data.last) }));
    this.draw();
  }

  draw() {
    const { rows, bad } = this.data;
    const shown = this.own ? rows.map((row) => this.centred(row)) : rows;
    const sorted = shown.flat().filter((value) => value !== null).sort((a, b) => a - b);
    let [low, high] = [sorted[Math.floor(sorted.length * 0.01)] ?? 0, sorted[Math.ceil(sorted.length * 0.995) - 1] ?? 1];
    if (this.own) [low, high] = [-Math.max(-low, high, 0.5), Math.max(-low, high, 0.5)];
    const [columns, height] = [rows[0]?.length || 1, rows.length];
    Object.assign(this.canvas, { width: columns, height });
    this.canvas.style.height = `${height * ROW}px`;
    const context = this.canvas.getContext("2d");
    const image = context.createImageData(columns, height);
    shown.forEach((row, r) => row.forEach((value, c) => {
      if (value === null) return;
      image.data.set([...shade((value - low) / (high - low || 1)), 255], 4 * (r * columns + c));
    }));
    for (const [c, r] of bad) image.data.set([214, 30, 62, 255], 4 * (r * columns + c));
    context.putImageData(image, 0, 0);
    const ramp = this.ramp.getContext("2d");
    for (let i = 0; i < 64; i += 1) {
      ramp.fillStyle = `rgb(${shade(i / 63).join(",")})`;
      ramp.fillRect(i, 0, 1, 1);
    }
    const power = (value) => (this.own ? `÷×${say(10 ** Math.abs(value))}` : say(10 ** value));
    this.low.textContent = this.own ? `1/${say(10 ** -low)}` : power(low);
    this.high.textContent = this.own ? `×${say(10 ** high)}` : power(high);
  }

  centred(row) {
    const middle = median(row);
    return row.map((value) => (value === null ? null : value - middle));
  }

  point(event) {
    const { rows, names, first, last, bad } = this.data;
    const frame = this.canvas.getBoundingClientRect();
    const r = Math.min(Math.floor(((event.clientY - frame.top) / frame.height) * rows.length), rows.length - 1);
    const c = Math.min(Math.floor(((event.clientX - frame.left) / frame.width) * rows[0].length), rows[0].length - 1);
    if (r < 0 || c < 0) return;
    const wrong = bad.some(([column, row]) => column === c && row === r);
    const value = rows[r][c];
    const step = first + ((last - first) * (c + 0.5)) / rows[0].length;
    const norm = wrong ? "non-finite" : value === null ? "zero or missing" : say(10 ** value);
    this.told.textContent = `${names[r]}: ${norm}, near step ${sayStep(step)}`;
  }
}
