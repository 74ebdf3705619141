// The page of one run or of a comparison: charts from the data in the page, cases that open to a closer look.
function island(id) {
  const node = document.getElementById(id);
  return node ? JSON.parse(node.textContent) : null;
}

// In the page, the steps of a line are the first and the distances between them, or one distance for all.
function withSteps(data) {
  for (const { panels } of [data, ...Object.values(data.near)]) {
    for (const line of panels.flatMap((panel) => panel.lines)) {
      const { from, by } = line.x;
      let step = from;
      line.x = line.y.map((_, i) => (step += i ? by[i - 1] ?? by : 0));
    }
  }
  return data;
}

class RunPage {
  constructor(data) {
    this.group = new Group();
    this.box = document.getElementById("charts");
    this.heatBox = document.getElementById("heat");
    this.reset = document.getElementById("reset-zoom");
    this.charts = new Map();
    this.near = async (first, last, step) => this.data.near?.[step] || this.data;
    if (data.runs) this.group.legend = new Legend(document.getElementById("legend"), data.runs, this.group);
    this.give(data);
    this.group.heard.push((range) => { if (this.reset) this.reset.hidden = !range; });
    this.reset?.addEventListener("click", () => this.group.look(null));
    const smooth = document.getElementById("smooth");
    smooth?.addEventListener("input", () => {
      this.group.smooth = Number(smooth.value) / 100;
      this.group.redraw();
    });
  }

  give(data) {
    this.data = data;
    this.group.show(data, this.group.zoom ? this.group.whole : stepsOf(data.panels));
    const strip = document.getElementById("strip");
    if (strip && !this.strip) this.strip = new Strip(strip, this.group);
    data.panels.forEach((panel, i) => {
      const known = this.charts.get(panel.key);
      if (known) return known.give(panel);
      const box = make("div", { class: "card panel", "data-panel": panel.key });
      this.box.append(box);
      return this.charts.set(panel.key, new Chart(box, panel, this.group, { height: i ? 150 : 260 }));
    });
    if (data.parallel && !this.parallel) this.parallel = new Parallel(document.getElementById("parallel"), data, this.group);
    this.heatBox.hidden = !data.heats.length;
    if (data.heats.length) {
      if (this.heat) this.heat.give(data.heats);
      else this.heat = new Heat(this.heatBox, data.heats, this.group);
    }
    this.group.redraw();
  }
}

async function closeLook(details, page) {
  const box = details.querySelector(".near");
  if (!box || box.childElementCount) return;
  const wide = make("div", { class: "charts" });
  box.append(wide);
  const [first, last] = [Number(details.dataset.first), Number(details.dataset.last)];
  const margin = Math.max(40, (last - first) * 0.5);
  const unguarded = page.data.unguarded?.[first] || {};
  const range = [Math.max(first - margin, 0), Math.max(last + margin, unguarded.loss?.x.at(-1) ?? 0)];
  const data = await page.near(range[0], range[1], first);
  const near = new Group();
  near.show({ marks: page.data.marks, restarts: page.data.restarts, unit: page.data.unit }, range);
  for (const key of ["loss", "norm", "lr"]) {
    const panel = data.panels.find((one) => one.key === key);
    if (!panel || (key === "lr" && !panel.ghosts?.length)) continue;
    const lines = panel.lines.filter(({ role }) => !role.includes("typical"));
    if (unguarded[key]) lines.push(unguarded[key]);
    const holder = make("div", { class: "panel" });
    wide.append(holder);
    new Chart(holder, { ...panel, lines, title: `${panel.title} around it` }, near, { height: 140, bare: true });
  }
  near.redraw();
}

function openCase(step) {
  const details = document.getElementById(`case-${step}`);
  if (!details) return;
  details.open = true;
  history.replaceState(null, "", `#case-${step}`);
  details.scrollIntoView({ behavior: "smooth", block: "start" });
}

// On paper everything is open; what was closed is closed again afterwards.
function startPrinting() {
  let opened = [];
  const open = () => {
    opened = [...opened, ...document.querySelectorAll("details:not([open])")];
    opened.forEach((one) => (one.open = true));
  };
  const close = () => opened.splice(0).forEach((one) => (one.open = false));
  const paper = matchMedia("print");
  paper.addEventListener("change", () => (paper.matches ? open() : close()));
  window.addEventListener("beforeprint", open);
  window.addEventListener("afterprint", close);
}

function startRun() {
  startCopying(document);
  startPrinting();
  document.querySelectorAll("table.sortable").forEach((table) => startSorting(table));
  const data = island("run-data");
  if (!data) return null;
  const page = new RunPage(withSteps(data));
  document.addEventListener("toggle", (event) => {
    if (event.target.classList?.contains("case") && event.target.open) closeLook(event.target, page);
  }, true);
  const asked = /^#case-(\d+)$/.exec(location.hash);
  if (asked) openCase(asked[1]);
  return page;
}
