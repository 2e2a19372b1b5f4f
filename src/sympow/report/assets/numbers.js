// Numbers: how they are written, where ticks stand, and means over seeds and windows.

/** Four digits, thousands apart; very small and very large ones with an exponent. */
function formatNumber(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(4)));
}

/** For axes: 16,384 stays, 12,000,000 becomes 12M. */
function formatTick(x) {
  const size = Math.abs(x);
  for (const [unit, limit] of [["G", 1e9], ["M", 1e6]]) {
    if (size >= limit) return `${Number((x / limit).toPrecision(3))}${unit}`;
  }
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return x.toExponential(0).replace("e+", "e");
  return String(Number(x.toPrecision(3)));
}

function formatSeconds(seconds) {
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds < 6000) return `${Number((seconds / 60).toPrecision(3))} min`;
  return `${Number((seconds / 3600).toPrecision(3))} h`;
}

/** About `count` round numbers within [low, high]. */
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? 10 * power;
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12) + 1e-12 * step; n++) ticks.push(n * step);
  return ticks;
}

/** Powers of the base within [low, high], thinned to about `count`; 1, 2, 5 times powers of ten if there are few. */
function logTicks(low, high, count, base) {
  const exponents = (b) => [Math.ceil(Math.log(low) / Math.log(b) - 1e-9), Math.floor(Math.log(high) / Math.log(b) + 1e-9)];
  const [first, last] = exponents(base);
  const ticks = [];
  const every = Math.max(1, Math.ceil((last - first + 1) / count));
  for (let n = first; n <= last; n += every) ticks.push(base ** n);
  if (ticks.length >= 3 || base !== 10) return ticks;
  const finer = [];
  for (let n = first - 1; n <= last; n++) for (const m of [1, 2, 5]) finer.push(m * 10 ** n);
  const inside = finer.filter((x) => x >= low * (1 - 1e-9) && x <= high * (1 + 1e-9));
  return inside.length >= 3 ? inside : linearTicks(low, high, count).filter((x) => x > 0);
}

/** Means over the steps within a window around each point: narrower near the beginning, where curves are steep, so that
    it stays centred; cut off at the end. */
function smooth(steps, values, counts, window) {
  if (!(window > 0)) return values;
  const smoothed = new Array(values.length);
  let low = 0, high = 0, weight = 0, total = 0;
  for (let n = 0; n < steps.length; n++) {
    const reach = Math.min(window / 2, steps[n] - steps[0]);
    for (; high < steps.length && steps[high] <= steps[n] + reach; high++) {
      const count = counts ? counts[high] : 1;
      weight += count;
      total += count * values[high];
    }
    for (; steps[low] < steps[n] - reach; low++) {
      const count = counts ? counts[low] : 1;
      weight -= count;
      total -= count * values[low];
    }
    smoothed[n] = total / weight;
  }
  return smoothed;
}

/** Mean, lowest and highest of the numbers that are there; null if none are. */
function spread(numbers) {
  const known = numbers.filter((x) => x !== null && x !== undefined);
  if (!known.length) return null;
  return {
    mean: known.reduce((a, b) => a + b, 0) / known.length,
    low: Math.min(...known),
    high: Math.max(...known),
    count: known.length,
  };
}

/** At every x that all curves (arrays of [x, y]) share: {x, y, low, high, count}. */
function meanAndRange(curves) {
  const found = new Map();
  for (const curve of curves) {
    for (const [x, y] of curve) {
      if (!found.has(x)) found.set(x, []);
      found.get(x).push(y);
    }
  }
  const points = [];
  for (const [x, ys] of found) {
    if (ys.length !== curves.length) continue;
    const { mean, low, high, count } = spread(ys);
    points.push({ x, y: mean, low, high, count });
  }
  return points.sort((a, b) => a.x - b.x);
}

/** A value of a piecewise linear function through (xs, ys); beyond the ends, that of the end. */
function interpolate(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}
