// The list of runs: sorted, grouped and filtered here, so that a thousand answer at once; only rows that are seen are made.
const PART = 60; // rows made at a time
const MOST_COMPARED = 60;
const USUAL = ["curve", "loss", "val", "health", "said", "steps", "age"];

const COLUMNS = {
  name: { title: "run", value: (run) => run.key, cell: nameCell },
  state: { title: "state", value: (run) => run.state, cell: (run) => make("td", { class: "state", text: run.state }) },
  curve: { title: "loss curve", cell: (run) => make("td", { class: "curve-of" }, sparkOf(run)) },
  loss: { title: "loss", number: true, value: (run) => run.loss },
  val: { title: "validation", number: true, value: (run) => run.val },
  health: { title: "incidents", value: (run) => run.incidents, cell: (run) => make("td", { class: "health" }, run.tag && make("span", { class: `tag ${run.tag[1]}`, text: run.tag[0] })) },
  said: { title: "diagnosis", value: (run) => run.said, cell: (run) => make("td", { class: `said${run.ill ? " ill" : ""}` }, make("span", { text: run.said, title: run.said })) },
  steps: { title: "steps", number: true, value: (run) => run.steps, text: (run) => sayStep(run.steps) },
  age: { title: "updated", value: (run) => -run.changed, cell: (run) => make("td", { class: "age" }, make("time", { "data-changed": run.changed })) },
};

// Hyperparameters have columns too, made when a run brings them.
function columnOf(id) {
  if (COLUMNS[id]) return COLUMNS[id];
  const name = id.slice(2);
  const value = (run) => run.hparams?.[name];
  return { title: name, number: true, value, text: (run) => (typeof value(run) === "number" ? say(value(run)) : value(run) ?? "–") };
}

function nameCell(run) {
  const link = make("a", { href: `/run?name=${encodeURIComponent(run.key)}`, text: run.key });
  return make("td", { class: "name" }, make("span", { class: `dot ${run.dot}`, title: run.state }), make("span", {}, link, " ", make("small", { text: run.state })));
}

// Two digits of base 36 for each column: its lowest and highest value, in order.
function sparkOf(run) {
  const svg = make("svg", { class: "spark", viewBox: "0 0 120 30", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [x, severity] of run.marks || []) svg.append(make("line", { class: severity, x1: x, x2: x, y1: 0, y2: 30 }));
  const wide = 120 / Math.max(run.spark.length - 1, 1);
  let [d, pen] = ["", "M"];
  [...run.spark].forEach((digit, i) => {
    if (digit === ".") pen = "M";
    else {
      d += `${pen}${(i * wide).toFixed(1)} ${(28 - (parseInt(digit, 36) / 35) * 26).toFixed(1)}`;
      pen = "L";
    }
  });
  svg.append(make("path", { class: run.known ? "" : "pale", d }));
  return svg;
}

function rowOf(run, columns, chosen) {
  const box = make("input", { type: "checkbox", "aria-label": `select ${run.key}` });
  box.checked = chosen.has(run.key);
  const cells = columns.map((id) => {
    const column = columnOf(id);
    if (column.cell) return column.cell(run);
    const text = column.text ? column.text(run) : say(column.value(run));
    return make("td", { class: `value ${id in COLUMNS ? id : "hparam"}`, "data-title": column.title, text });
  });
  return make("tr", { class: "run", "data-run": run.key, "data-state": run.state }, make("td", { class: "box" }, box), ...cells);
}

// Words that all have to be there; `name<1`, `name>1` and `name=x` compare a column or a hyperparameter.
function fits(run, words) {
  const text = `${run.key} ${run.state} ${run.said} ${run.tag?.[0] || ""} ${Object.entries(run.hparams || {}).map(([k, v]) => `${k}=${v}`).join(" ")}`.toLowerCase();
  return words.every((word) => {
    const [, name, sign, wanted] = /^([^<>=]+)([<>=])(.+)$/.exec(word) || [];
    const found = name && Object.entries({ ...run, ...run.hparams }).find(([key]) => key.toLowerCase() === name);
    if (!found || (sign !== "=" && !Number.isFinite(Number(wanted)))) return text.includes(word);
    if (sign === "=") return String(found[1]).toLowerCase() === wanted || (found[1] !== null && Number(found[1]) === Number(wanted));
    if (typeof found[1] !== "number") return false;
    return sign === "<" ? found[1] < Number(wanted) : found[1] > Number(wanted);
  });
}

function groupsOf(runs, by) {
  const name = {
    state: (run) => run.state,
    folder: (run) => run.key.split("/").slice(0, -1).join("/") || ".",
    diagnosis: (run) => run.said.split(/[:(,;.]/)[0] || "–",
  }[by] || ((run) => String(run.hparams?.[by.slice(2)] ?? "–"));
  const groups = new Map();
  for (const run of runs) {
    if (!groups.has(name(run))) groups.set(name(run), []);
    groups.get(name(run)).push(run);
  }
  return [...groups].sort(([a], [b]) => ordered(a, b, false));
}

class RunList {
  constructor(table) {
    this.table = table;
    this.runs = new Map();
    this.chosen = new Set();
    this.made = new Map();
    this.limit = PART;
    this.get = (id) => document.getElementById(id);
    this.states = [...document.querySelectorAll("[data-state-button]")];
    this.readAddress();
    this.listen();
  }

  // What is shown stands in the address, so that it can be sent to somebody.
  readAddress() {
    const asked = new URLSearchParams(location.search);
    this.get("filter").value = asked.get("q") || "";
    const wanted = (asked.get("state") || "").split(",");
    this.states.forEach((one) => one.setAttribute("aria-pressed", String(wanted.includes(one.dataset.stateButton))));
    this.sort = asked.get("sort") || "age";
    this.group = asked.get("group") || "";
    this.columns = asked.has("columns") ? asked.get("columns").split(",").filter(Boolean) : USUAL;
  }

  writeAddress() {
    const told = new URLSearchParams();
    const states = this.pressed();
    if (this.get("filter").value) told.set("q", this.get("filter").value);
    if (states.length) told.set("state", states.join(","));
    if (this.sort !== "age") told.set("sort", this.sort);
    if (this.group) told.set("group", this.group);
    if (this.columns.join() !== USUAL.join()) told.set("columns", this.columns.join(","));
    const query = told.toString();
    history.replaceState(null, "", query ? `?${query}` : location.pathname);
  }

  pressed() {
    return this.states.filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.stateButton);
  }

  listen() {
    const again = () => { this.limit = PART; this.writeAddress(); this.draw(); };
    this.get("filter").addEventListener("input", again);
    this.states.forEach((one) => one.addEventListener("click", () => {
      one.setAttribute("aria-pressed", String(one.getAttribute("aria-pressed") !== "true"));
      again();
    }));
    this.get("group").addEventListener("change", (event) => { this.group = event.target.value; again(); });
    this.get("columns").addEventListener("change", (event) => {
      const id = event.target.value;
      const all = this.known();
      const next = event.target.checked ? [...this.columns, id] : this.columns.filter((one) => one !== id);
      this.columns = all.filter((one) => next.includes(one));
      again();
    });
    this.table.addEventListener("click", (event) => {
      const id = event.target.closest("th")?.dataset.sort;
      if (!id || !event.target.closest("button")) return;
      this.sort = this.sort === id ? `-${id}` : id;
      again();
    });
    this.table.addEventListener("change", (event) => {
      const row = event.target.closest("[data-run]");
      const keys = row ? [row.dataset.run] : this.sifted().slice(0, MOST_COMPARED).map((run) => run.key);
      keys.forEach((key) => (event.target.checked ? this.chosen.add(key) : this.chosen.delete(key)));
      if (!row && !event.target.checked) this.chosen.clear();
      if (!row) this.made.forEach(({ node }, key) => (node.querySelector("input").checked = this.chosen.has(key)));
      this.count();
    });
    new IntersectionObserver((seen) => {
      if (!seen.some((one) => one.isIntersecting) || this.limit >= this.items) return;
      this.limit += PART;
      this.draw();
    }, { rootMargin: "600px" }).observe(this.get("more"));
  }

  known() {
    const names = new Set([...this.runs.values()].flatMap((run) => Object.keys(run.hparams || {})));
    return [...Object.keys(COLUMNS).filter((id) => id !== "name"), ...[...names].sort().map((name) => `h.${name}`)];
  }

  take({ rows, keys }) {
    for (const run of rows) this.runs.set(run.key, run);
    if (keys) {
      const here = new Set(keys);
      [...this.runs.keys()].forEach((key) => here.has(key) || this.runs.delete(key));
    }
    this.choices();
    this.draw();
  }

  // The columns and groups there are to choose from; only when others have come.
  choices() {
    const all = this.known();
    if (all.join() === this.offered) return;
    this.offered = all.join();
    this.get("columns").replaceChildren(...all.map((id) => {
      const box = make("input", { type: "checkbox", value: id });
      box.checked = this.columns.includes(id);
      return make("label", {}, box, ` ${columnOf(id).title}`);
    }));
    const groups = [["", "no groups"], ["state", "state"], ["folder", "folder"], ["diagnosis", "diagnosis"],
      ...all.filter((id) => id.startsWith("h.")).map((id) => [id, id.slice(2)])];
    this.get("group").replaceChildren(...groups.map(([value, text]) => make("option", { value, text })));
    this.get("group").value = this.group;
  }

  sifted() {
    const words = this.get("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = this.pressed();
    const found = [...this.runs.values()].filter((run) => (!wanted.length || wanted.includes(run.state)) && fits(run, words));
    const [down, id] = this.sort.startsWith("-") ? [true, this.sort.slice(1)] : [false, this.sort];
    const value = columnOf(id).value || columnOf("age").value;
    return found.sort((a, b) => ordered(value(a), value(b), down) || (a.key < b.key ? -1 : 1));
  }

  draw() {
    const runs = this.sifted();
    const columns = ["name", ...this.columns];
    this.heads(columns);
    const parts = this.group ? groupsOf(runs, this.group) : [["", runs]];
    const wanted = [];
    for (const [name, members] of parts) {
      if (wanted.length >= this.limit) break;
      if (this.group) wanted.push(this.heading(name, members, columns.length + 1));
      for (const run of members.slice(0, Math.max(this.limit - wanted.length, 0))) wanted.push(this.row(run, columns));
    }
    this.items = runs.length + (this.group ? parts.length : 0);
    const body = this.table.tBodies[0];
    // Only what has changed is replaced, so that nothing moves under a finger.
    if (wanted.length !== body.rows.length || wanted.some((row, i) => body.rows[i] !== row)) body.replaceChildren(...wanted);
    this.get("none").hidden = runs.length > 0 || this.runs.size === 0;
    this.get("no-runs").hidden = this.runs.size > 0;
    this.table.parentElement.hidden = !runs.length;
    this.get("shown").textContent = runs.length === this.runs.size ? "" : `${runs.length.toLocaleString("en-GB")} shown`;
    this.count();
    this.age();
  }

  heads(columns) {
    const told = `${columns.join()} ${this.sort}`;
    if (told === this.headed) return;
    this.headed = told;
    const all = make("input", { type: "checkbox", "aria-label": `select the first ${MOST_COMPARED} runs shown` });
    this.table.tHead.replaceChildren(make("tr", {}, make("th", { class: "box" }, all), ...columns.map((id) => {
      const column = columnOf(id);
      const head = make("th", { scope: "col", class: column.number ? "n" : "", "data-sort": column.value ? id : null });
      head.append(column.value ? make("button", { type: "button", text: column.title }) : make("span", { text: column.title }));
      if (this.sort.replace(/^-/, "") === id) head.setAttribute("aria-sort", this.sort.startsWith("-") ? "descending" : "ascending");
      return head;
    })));
  }

  heading(name, members, wide) {
    const best = Math.min(...members.map((run) => run.val ?? Infinity));
    const text = ` ${members.length} ${members.length === 1 ? "run" : "runs"}${Number.isFinite(best) ? `, best validation ${say(best)}` : ""}`;
    return make("tr", { class: "group" }, make("th", { colspan: wide, scope: "rowgroup" }, make("b", { text: name }), make("span", { class: "soft", text })));
  }

  row(run, columns) {
    const stamp = JSON.stringify([run, columns]);
    const before = this.made.get(run.key);
    if (before?.stamp === stamp) return before.node;
    const node = rowOf(run, columns, this.chosen);
    this.made.set(run.key, { stamp, node });
    return node;
  }

  count() {
    const here = [...this.chosen].filter((key) => this.runs.has(key)).slice(0, MOST_COMPARED);
    const compare = this.get("compare");
    compare.textContent = here.length > 1 ? `compare ${here.length} runs` : "compare: select two or more";
    if (here.length > 1) compare.href = `/compare?${here.map((key) => `run=${encodeURIComponent(key)}`).join("&")}`;
    else compare.removeAttribute("href");
  }

  age() {
    const now = Date.now() / 1000;
    this.table.querySelectorAll("time").forEach((node) => (node.textContent = sayAgo(now - Number(node.dataset.changed))));
  }
}

function startList() {
  const table = document.getElementById("runs");
  if (!table) return;
  const list = new RunList(table);
  list.take(island("list-data"));
  let seen = "";
  keepAsking(async () => {
    const told = await ask(`/api/runs?seen=${encodeURIComponent(seen)}`);
    if (!told) return list.age();
    seen = told.version;
    document.getElementById("many").textContent = told.many;
    return list.take(told);
  })();
}
