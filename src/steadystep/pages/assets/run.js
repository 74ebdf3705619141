// The page of one run or of a comparison: charts from the data in the page, cases that open to a closer look.
function island(id) {
  const node = document.getElementById(id);
  return node ? JSON.parse(node.textContent) : null;
}

class RunPage {
  constructor(data) {
    this.group = new Group();
    this.box = document.getElementById("charts");
    this.heatBox = document.getElementById("heat");
    this.reset = document.getElementById("reset-zoom");
    this.charts = new Map();
    this.near = async (first, last, step) => this.data.near?.[step] || this.data;
    this.give(data);
    this.group.heard.push((range) => { if (this.reset) this.reset.hidden = !range; });
    this.reset?.addEventListener("click", () => this.group.look(null));
  }

  give(data) {
    this.data = data;
    this.group.show(data, this.group.zoom ? this.group.whole : stepsOf(data.panels));
    data.panels.forEach((panel, i) => {
      const known = this.charts.get(panel.key);
      if (known) return known.give(panel);
      const box = make("div", { class: "card panel", "data-panel": panel.key });
      this.box.append(box);
      return this.charts.set(panel.key, new Chart(box, panel, this.group, { height: i ? 170 : 280 }));
    });
    this.group.redraw();
    this.heatBox.hidden = !data.heat;
    if (!data.heat) return;
    if (this.heat) this.heat.give(data.heat);
    else this.heat = new Heat(this.heatBox, data.heat);
  }
}

async function closeLook(details, page) {
  const box = details.querySelector(".near");
  if (!box || box.childElementCount) return;
  const wide = make("div", { class: "charts" });
  box.append(wide);
  const [first, last] = [Number(details.dataset.first), Number(details.dataset.last)];
  const margin = Math.max(40, (last - first) * 0.5);
  const range = [Math.max(first - margin, 0), last + margin];
  const data = await page.near(range[0], range[1], first);
  const near = new Group();
  near.show({ marks: page.data.marks, restarts: page.data.restarts }, range);
  for (const key of ["loss", "norm"]) {
    const panel = data.panels.find((one) => one.key === key);
    if (!panel) continue;
    const lines = panel.lines.filter(({ role }) => !role.includes("typical"));
    const holder = make("div", { class: "panel" });
    wide.append(holder);
    new Chart(holder, { ...panel, lines, title: `${panel.title} around it` }, near, { height: 140 });
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

function startRun() {
  const data = island("run-data");
  if (!data) return null;
  const page = new RunPage(data);
  document.addEventListener("toggle", (event) => {
    if (event.target.classList?.contains("case") && event.target.open) closeLook(event.target, page);
  }, true);
  const asked = /^#case-(\d+)$/.exec(location.hash);
  if (asked) openCase(asked[1]);
  return page;
}
