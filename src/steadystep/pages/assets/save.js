// A chart as a picture or a table, made here and saved by the browser: nothing is sent anywhere.
const DRAWN = ["stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "fill", "opacity", "visibility", "font-size", "font-family"];

function save(name, address) {
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

function fileName(chart, ending) {
  const page = document.querySelector("h1")?.textContent || "run";
  return `${page}-${chart.panel.title}`.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 80) + ending;
}

// Styles of the page do not reach a picture, so they are written into it.
function withStyles(svg) {
  const copy = svg.cloneNode(true);
  const [from, to] = [[svg, ...svg.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const name of DRAWN) to[i].setAttribute(name, style.getPropertyValue(name));
    to[i].removeAttribute("class");
  });
  return copy;
}

function savePicture(chart) {
  const { width } = chart.edge;
  const [height, room] = [chart.height, 24];
  const style = getComputedStyle(document.documentElement);
  const picture = withStyles(chart.svg);
  picture.setAttribute("xmlns", SVG);
  picture.setAttribute("viewBox", `0 ${-room} ${width} ${height + room}`);
  picture.setAttribute("width", width);
  picture.setAttribute("height", height + room);
  picture.prepend(make("rect", { x: 0, y: -room, width, height: height + room, fill: style.getPropertyValue("--paper") }));
  const title = `${document.querySelector("h1")?.textContent || ""}: ${chart.panel.title}`;
  picture.append(make("text", { x: 46, y: -8, text: title, fill: style.getPropertyValue("--ink"), "font-size": 13, "font-family": "sans-serif" }));
  const image = new Image();
  image.addEventListener("load", () => {
    const canvas = make("canvas", { width: width * 2, height: (height + room) * 2 });
    canvas.getContext("2d").drawImage(image, 0, 0, width * 2, (height + room) * 2);
    save(fileName(chart, ".png"), canvas.toDataURL("image/png"));
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(picture))}`;
}

// A cell that a spreadsheet takes as text: quotes doubled, and nothing that it would compute.
function cell(value) {
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function tableOf(chart) {
  const [first, last] = chart.group.range;
  const lines = chart.panel.lines.filter((line) => !chart.isHidden(line) && !line.role.includes("raw"));
  const columns = lines.map((line) => [line.name, new Map(line.x.map((x, i) => [x, line.y[i]])), new Map(line.bad)]);
  if (chart.panel.ghosts?.length) columns.push(["refused", new Map(chart.panel.ghosts), new Map()]);
  const steps = [...new Set(columns.flatMap(([, values]) => [...values.keys()]))].filter((step) => step >= first && step <= last);
  const rows = steps.sort((a, b) => a - b).map((step) =>
    [step, ...columns.map(([, values, bad]) => bad.get(step) ?? values.get(step) ?? "")]);
  return [[chart.group.unit, ...columns.map(([name]) => name)], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

function saveTable(chart) {
  save(fileName(chart, ".csv"), `data:text/csv;charset=utf-8,${encodeURIComponent(tableOf(chart))}`);
}

// Commands can be copied.
function startCopying(root) {
  for (const pre of root.querySelectorAll("pre.command:not(.copied)")) {
    pre.classList.add("copied");
    const text = pre.textContent;
    const button = make("button", { class: "quiet copy", type: "button", text: "copy" });
    button.addEventListener("click", async () => {
      button.textContent = (await copied(text)) ? "copied" : "select and copy";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
    pre.append(button);
  }
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
