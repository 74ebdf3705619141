// The list of runs: filter, choose some to compare, and rows that keep themselves up to date.
function startList() {
  const table = document.getElementById("runs");
  if (!table) return;
  const filter = document.getElementById("filter");
  const states = [...document.querySelectorAll("[data-state-button]")];
  const compare = document.getElementById("compare");
  const none = document.getElementById("none");
  const chosen = new Set();

  const rows = () => [...table.querySelectorAll("[data-run]")];
  const sift = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = states.filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.stateButton);
    let left = 0;
    for (const row of rows()) {
      const text = row.textContent.toLowerCase();
      const fits = words.every((word) => text.includes(word)) && (!wanted.length || wanted.includes(row.dataset.state));
      row.hidden = !fits;
      left += fits;
    }
    none.hidden = left > 0 || rows().length === 0;
  };
  const count = () => {
    const here = rows().map((row) => row.dataset.run).filter((name) => chosen.has(name));
    const query = here.map((name) => `run=${encodeURIComponent(name)}`).join("&");
    compare.textContent = here.length > 1 ? `compare ${here.length} runs` : "compare: select two or more";
    if (here.length > 1) compare.href = `/compare?${query}`;
    else compare.removeAttribute("href");
  };

  filter.addEventListener("input", sift);
  states.forEach((one) => one.addEventListener("click", () => {
    one.setAttribute("aria-pressed", String(one.getAttribute("aria-pressed") !== "true"));
    sift();
  }));
  table.addEventListener("change", (event) => {
    const row = event.target.closest("[data-run]");
    if (!row || event.target.type !== "checkbox") return;
    if (event.target.checked) chosen.add(row.dataset.run);
    else chosen.delete(row.dataset.run);
    count();
  });
  // Only a row that says something new is replaced, so that nothing moves under a finger.
  const known = new Map();
  const printed = (row) => {
    const copy = row.cloneNode(true);
    copy.hidden = false;
    copy.querySelector("time").textContent = "";
    return copy.outerHTML;
  };
  const place = (told) => {
    const before = new Map(rows().map((row) => [row.dataset.run, row]));
    const wanted = told.map(([key, html]) => {
      if (before.has(key) && known.get(key) === html) return before.get(key);
      known.set(key, html);
      const made = document.createElement("template");
      made.innerHTML = html;
      const row = made.content.firstElementChild;
      if (before.has(key) && printed(before.get(key)) === printed(row)) return before.get(key);
      row.querySelector("input").checked = chosen.has(key);
      before.get(key)?.replaceWith(row);
      return row;
    });
    if (wanted.some((row, i) => table.children[i] !== row) || table.children.length !== wanted.length) table.replaceChildren(...wanted);
  };
  const age = () => rows().forEach((row) => {
    const node = row.querySelector("time");
    node.textContent = sayAgo(Date.now() / 1000 - Number(node.dataset.changed));
  });
  let seen = "";
  keepAsking(async () => {
    const told = await ask(`/api/runs?seen=${encodeURIComponent(seen)}`);
    if (told) {
      seen = told.version;
      place(told.rows);
      document.getElementById("many").textContent = told.many;
      document.getElementById("no-runs").hidden = told.rows.length > 0;
      sift();
      count();
    }
    age();
  });
  age();
  sift();
  count();
}

startTheme();
startLive(startRun());
startList();
