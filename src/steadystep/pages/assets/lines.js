// Curves: finding a step, the range in view, the path that draws it, and a smoother one.
function firstAt(xs, step) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The place of the last point at or before a step: what was known there, never the next validation.
function lastAt(line, step) {
  return firstAt(line.x, step + 1e-9 * Math.max(1, Math.abs(step))) - 1;
}

// The value at a step, with the step it is from where that is farther away than a pixel shows.
function readAt(line, step, pixel) {
  const at = lastAt(line, step);
  if (at < 0) return "–";
  const wrong = line.bad.find(([bad]) => bad === line.x[at]);
  const value = wrong ? wrong[1] : say(line.y[at]);
  const smooth = line.role === "lr" ? 8 : 1; // pixels; a learning rate has fewer points, because it bends slowly
  const far = step - line.x[at] > Math.max(smooth * pixel, 0.5) && !line.role.includes("typical"); // that one is of a stretch
  return far ? `${value} at ${sayStep(line.x[at])}` : value;
}

function stepsOf(panels) {
  let [low, high] = [Infinity, -Infinity];
  for (const { lines } of panels) {
    for (const { x } of lines) {
      if (!x.length) continue;
      low = Math.min(low, x[0]);
      high = Math.max(high, x[x.length - 1]);
    }
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function valuesOf(lines, [first, last], log) {
  let [low, high] = [Infinity, -Infinity];
  for (const { x, y } of lines) {
    for (let i = firstAt(x, first); i < x.length && x[i] <= last; i += 1) {
      const value = y[i];
      if (value === null || (log && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low > high ? null : padded(low, high, log);
}

function pathOf({ x, y }, [first, last], placeX, placeY, log) {
  const from = Math.max(firstAt(x, first) - 1, 0);
  const to = Math.min(firstAt(x, last) + 1, x.length - 1);
  let path = "";
  let joined = 0;
  const lonely = () => (joined === 1 ? "m-3 0l3-3 3 3-3 3z" : ""); // a line of one point would not be seen
  for (let i = from; i <= to; i += 1) {
    const value = y[i];
    if (value === null || (log && value <= 0)) {
      path += lonely();
      joined = 0;
      continue;
    }
    path += `${joined ? "L" : "M"}${placeX(x[i]).toFixed(1)} ${placeY(value).toFixed(1)}`;
    joined += 1;
  }
  return path + lonely();
}

// An exponential mean, without its bias at the start. `weight` is what stays after the usual distance of two points.
function smoothed(line, weight) {
  const { x, y } = line;
  const usual = (x[x.length - 1] - x[0]) / Math.max(x.length - 1, 1) || 1;
  let [mean, total] = [0, 0];
  const smooth = y.map((value, i) => {
    if (value === null) return null;
    const stays = i ? weight ** ((x[i] - x[i - 1]) / usual) : 0;
    mean = mean * stays + value * (1 - weight);
    total = total * stays + (1 - weight);
    return mean / total;
  });
  return { ...line, y: smooth };
}
