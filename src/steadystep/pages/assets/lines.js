// Curves: finding a step, the range in view, and the path that draws it.
function firstAt(xs, step) {
  let [low, high] = [0, xs.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(line, step) {
  const at = firstAt(line.x, step);
  if (at === 0) return 0;
  if (at >= line.x.length) return line.x.length - 1;
  return line.x[at] - step < step - line.x[at - 1] ? at : at - 1;
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
