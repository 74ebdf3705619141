// Numbers as a person reads them, and elements without markup strings: text from a log is only ever text.
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "path", "line", "rect", "circle", "text", "g"].includes(tag);
  const node = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function say(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-GB");
  return String(Number(value.toPrecision(4)));
}

function sayStep(step) {
  return Math.round(step).toLocaleString("en-GB");
}

function sayTick(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9 || size < 1e-3) return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
  if (size >= 1e6) return Number((value / 1e6).toPrecision(4)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(4)) + "k";
  return Number(value.toPrecision(4)).toLocaleString("en-GB", { maximumFractionDigits: 6 });
}

function sayAgo(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return seconds < 10 ? "now" : `${Math.floor(seconds)} s ago`;
}
