// What grows while one looks: asked for more than once a second, and only drawn when there is something new.
const EVERY_MS = 700;

async function ask(url, signal) {
  const answer = await fetch(url, { signal, headers: { Accept: "application/json" } });
  if (answer.status === 204) return null;
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

function keepAsking(work) {
  let busy = false;
  const sign = document.getElementById("lost");
  const once = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      await work();
      if (sign) sign.hidden = true;
    } catch (error) {
      if (sign && error.name !== "AbortError") sign.hidden = false;
    }
    busy = false;
  };
  setInterval(once, EVERY_MS);
  document.addEventListener("visibilitychange", once);
  return once;
}

// Replaces what the server rendered; a case that was open stays open.
const shown = new Map();

function exchange(id, html) {
  const node = document.getElementById(id);
  if (!node || shown.get(id) === html) return;
  shown.set(id, html);
  const open = [...node.querySelectorAll("details[open]")].map((one) => one.id);
  node.innerHTML = html;
  startCopying(node);
  open.forEach((name) => { const one = document.getElementById(name); if (one) one.open = true; });
}

function startLive(page) {
  const root = document.getElementById("live");
  if (!root || !page) return;
  let seen = root.dataset.version;
  const address = (extra) => {
    const zoom = page.group.zoom;
    const range = zoom ? `&first=${Math.floor(zoom[0])}&last=${Math.ceil(zoom[1])}` : "";
    return `${root.dataset.api}&seen=${encodeURIComponent(extra ? "" : seen)}${range}`;
  };
  const take = (told) => {
    if (!told) return;
    seen = told.version;
    page.give(told.charts);
    for (const [id, html] of Object.entries(told.parts)) exchange(id, html);
    root.dataset.version = seen;
  };
  page.near = async (first, last) =>
    (await ask(`${root.dataset.api}&seen=&first=${Math.floor(first)}&last=${Math.ceil(last)}`)).charts;
  const once = keepAsking(async () => take(await ask(address(false))));
  page.group.heard.push(async () => {
    try { take(await ask(address(true))); } catch { once(); }
  });
}
