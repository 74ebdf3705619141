// Axes: where a value is on the screen, and which values deserve a line.
function linearTicks(low, high, wanted) {
  const rough = (high - low) / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((times) => times * power >= rough) * power;
  const ticks = [];
  for (let n = Math.ceil(low / size); n * size <= high + size * 1e-9; n += 1) ticks.push(n * size);
  return ticks;
}

function logTicks(low, high, wanted) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const stride = Math.max(1, Math.ceil((last - first + 1) / wanted));
  const ticks = [];
  for (let n = first; n <= last; n += stride) ticks.push(10 ** n);
  if (ticks.length >= 2) return ticks;
  const inner = [1, 2, 5].flatMap((times) => [first - 1, first].map((n) => times * 10 ** n));
  const within = inner.filter((value) => value >= low && value <= high).sort((a, b) => a - b);
  return within.length >= 2 ? within : linearTicks(low, high, wanted);
}

function scaleOf(low, high, from, to, log) {
  const bend = log ? Math.log10 : (value) => value;
  const [a, b] = [bend(low), bend(high)];
  const place = (value) => from + ((bend(value) - a) / (b - a || 1)) * (to - from);
  place.back = (pixel) => a + ((pixel - from) / (to - from || 1)) * (b - a);
  return place;
}

// A little air above and below, and never an empty range.
function padded(low, high, log) {
  if (log) {
    const air = Math.max((high / low) ** 0.06, 1.05);
    return [low / air, high * air];
  }
  const air = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}
