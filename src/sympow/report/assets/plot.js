// A line plot in SVG: axes, bands, hover readout, zoom by dragging.

const PLOT_MARGIN = { top: 10, right: 14, bottom: 44 };
// Left of the vertical axis: its label, and what lies between that, the tick labels and the axis.
const AXIS_LABEL_WIDTH = 20, TICK_GAP = 8;
const LEAST_LEFT = 62;
const ruler = document.createElement("canvas").getContext("2d");

/** Pixels that a text of a plot takes. */
function textWidth(text) {
  ruler.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return ruler.measureText(text).width;
}

/** Room for the widest of the vertical axis' tick labels beside the axis' label. */
function leftMargin(spec, ticks) {
  const widest = Math.max(0, ...ticks.map((tick) => textWidth((spec.y.formatTick ?? formatTick)(tick))));
  return Math.max(LEAST_LEFT, Math.ceil(AXIS_LABEL_WIDTH + widest + TICK_GAP));
}

/**
 * Draws into `host`, and again whenever its width changes.
 *
 * spec: {
 *   label: what it shows, for those who do not see it,
 *   x, y: { label, log, base (of a logarithmic axis), ticks (fixed ones), format, formatTick, fromZero },
 *   lines: [{ style, name, points: [{ x, y, low, high, count, early }], markers, whiskers, faint, shift (pixels) }],
 *   marks: [{ x, label }],
 *   key: zoom is kept while this stays the same,
 * }
 */
function drawPlot(host, spec) {
  host.classList.add("plot");
  if (host.plotKey !== spec.key) host.zoom = null;
  host.plotKey = spec.key;
  host.plotSpec = spec;
  if (!host.observer) {
    host.observer = new ResizeObserver(() => {
      if (Math.round(host.clientWidth) !== host.drawnWidth) renderPlot(host);
    });
    host.observer.observe(host);
  }
  renderPlot(host);
}

function renderPlot(host) {
  const spec = host.plotSpec;
  const width = Math.max(240, Math.round(host.clientWidth));
  host.drawnWidth = Math.round(host.clientWidth);
  const height = Math.round(Math.min(420, Math.max(230, width * 0.58)));
  const y = makeScale(spec, "y", host.zoom, height - PLOT_MARGIN.bottom, PLOT_MARGIN.top);
  const left = leftMargin(spec, y.ticks);
  const x = makeScale(spec, "x", host.zoom, left, width - PLOT_MARGIN.right);
  const svg = makeSvg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": spec.label,
  });
  const clip = `clip-${(drawCount += 1)}`;
  svg.append(
    makeSvg("clipPath", { id: clip }, makeSvg("rect", frame(left, width, height))),
    ...axes(spec, x, y, left, width, height),
  );
  const inside = makeSvg("g", { "clip-path": `url(#${clip})` });
  for (const line of spec.lines) inside.append(...drawLine(line, x, y));
  svg.append(inside, ...marks(spec, x, width, height));
  host.replaceChildren(svg);
  if (host.zoom) {
    const reset = () => ((host.zoom = null), renderPlot(host));
    host.append(make("button", { type: "button", class: "reset", onclick: reset }, "Whole range"));
  }
  addReadout(svg, spec, x, y, left, width, height);
  addZoom(host, svg, x, y, left, width, height);
}
let drawCount = 0;

function frame(left, width, height) {
  return {
    x: left, y: PLOT_MARGIN.top,
    width: width - left - PLOT_MARGIN.right,
    height: height - PLOT_MARGIN.top - PLOT_MARGIN.bottom,
  };
}

/** From numbers to pixels between `from` and `to`, over all lines or what was zoomed to. */
function makeScale(spec, name, zoom, from, to) {
  const axis = spec[name];
  const log = Boolean(axis.log);
  let low = Infinity, high = -Infinity;
  const include = (value) => {
    if (value === null || value === undefined || (log && value <= 0)) return;
    low = Math.min(low, value);
    high = Math.max(high, value);
  };
  for (const line of spec.lines) {
    for (const point of line.points) {
      // What comes before does not stretch the axis; it runs out of the picture.
      if (name === "y" && point.early) continue;
      include(point[name]);
      if (name === "y") (include(point.low), include(point.high));
    }
  }
  for (const mark of spec.marks ?? []) if (name === "x") include(mark.x);
  if (axis.domain) (include(axis.domain[0]), include(axis.domain[1]));
  if (axis.fromZero && !log) include(0);
  if (low > high) [low, high] = log ? [1, 10] : [0, 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 20, high + (Math.abs(high) || 1) / 20];
  const pass = log ? Math.log : (v) => v;
  const back = log ? Math.exp : (v) => v;
  let [first, last] = [pass(low), pass(high)];
  if (zoom) [first, last] = zoom[name];
  else if (name === "y") {
    const room = (last - first) * 0.05;
    if (!(axis.fromZero && low === 0)) first -= room;
    last += room;
  } else if (log) {
    // For marks that stand beside each other where they would cover each other.
    const room = (last - first) * 0.05;
    [first, last] = [first - room, last + room];
  }
  const scale = (value) => from + ((pass(value) - first) / (last - first)) * (to - from);
  scale.raw = (pixel) => first + ((pixel - from) / (to - from)) * (last - first);
  scale.shown = (value) => !log || value > 0;
  const ends = [back(first), back(last)];
  const count = Math.max(2, Math.floor(Math.abs(to - from) / (name === "x" ? 80 : 36)));
  scale.ticks = axis.ticks
    ? thin(axis.ticks.filter((t) => t >= ends[0] && t <= ends[1]), scale, 48)
    : log ? logTicks(ends[0], ends[1], count, axis.base ?? 10) : linearTicks(ends[0], ends[1], count);
  return scale;
}

/** Ticks that stand at least so many pixels apart. */
function thin(ticks, scale, apart) {
  const kept = [];
  for (const tick of ticks) if (!kept.length || scale(tick) - scale(kept[kept.length - 1]) >= apart) kept.push(tick);
  return kept;
}

function axes(spec, x, y, left, width, height) {
  const { right, top, bottom } = PLOT_MARGIN;
  const parts = [];
  for (const tick of y.ticks) {
    parts.push(
      makeSvg("line", { class: "gridline", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      makeSvg("text", { class: "tick", x: left - TICK_GAP, y: y(tick) + 4, "text-anchor": "end" }, (spec.y.formatTick ?? formatTick)(tick)),
    );
  }
  for (const tick of x.ticks) {
    parts.push(
      makeSvg("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: top, y2: height - bottom }),
      makeSvg("text", { class: "tick", x: x(tick), y: height - bottom + 18, "text-anchor": "middle" }, (spec.x.formatTick ?? formatTick)(tick)),
    );
  }
  const middle = (height - bottom + top) / 2;
  parts.push(
    makeSvg("path", { class: "axis", fill: "none", d: `M${left},${top}V${height - bottom}H${width - right}` }),
    makeSvg("text", { class: "axis-label", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label),
    makeSvg("text", { class: "axis-label", transform: `translate(13,${middle}) rotate(-90)`, "text-anchor": "middle" }, spec.y.label),
  );
  return parts;
}

function drawLine(line, x, y) {
  const { style } = line;
  const points = line.points.filter((point) => x.shown(point.x) && y.shown(point.y) && point.y !== null);
  const parts = [];
  const place = (value) => value.toFixed(1);
  const across = (point) => x(point.x) + (line.shift ?? 0);
  const inside = points.filter((point) => point.high > point.low && y.shown(point.low));
  if (line.whiskers) {
    for (const point of inside) {
      const [at, top, bottom] = [across(point), y(point.high), y(point.low)].map(place);
      const cap = `${place(across(point) - 4)},`;
      parts.push(makeSvg("path", {
        class: "whisker", d: `M${cap}${top}h8M${cap}${bottom}h8M${at},${bottom}V${top}`, style: `stroke: ${style.colour}`,
      }));
    }
  } else if (inside.length) {
    const ranged = points.filter((point) => point.low !== undefined && y.shown(point.low));
    const upper = ranged.map((point) => `${place(across(point))},${place(y(point.high))}`);
    const lower = ranged.map((point) => `${place(across(point))},${place(y(point.low))}`).reverse();
    parts.push(makeSvg("path", { class: "band", d: `M${[...upper, ...lower].join("L")}Z`, style: `fill: ${style.colour}` }));
  }
  parts.push(
    makeSvg("path", {
      class: line.faint ? "line faint" : "line",
      "data-series": style.label,
      d: points.length ? `M${points.map((point) => `${place(across(point))},${place(y(point.y))}`).join("L")}` : "",
      style: `stroke: ${style.colour}; stroke-dasharray: ${style.dash.join(" ") || "none"}`,
    }),
  );
  if (line.markers || points.length === 1) for (const point of points) parts.push(marker(style, place(across(point)), place(y(point.y)), 3.5));
  return parts;
}

function marks(spec, x, width, height) {
  return (spec.marks ?? []).flatMap((mark) => {
    const at = x(mark.x);
    const left = at > width / 2;
    return [
      makeSvg("line", { class: "training-context", x1: at, x2: at, y1: PLOT_MARGIN.top, y2: height - PLOT_MARGIN.bottom }),
      makeSvg("text", {
        class: "training-context-label", x: at + (left ? -5 : 5), y: PLOT_MARGIN.top + 12, "text-anchor": left ? "end" : "start",
      }, mark.label),
    ];
  });
}

/** A line at the nearest x under the pointer, or moved by arrow keys, with every series' number there. */
function addReadout(svg, spec, x, y, left, width, height) {
  const lines = spec.lines.filter((line) => line.points.length && !line.faint);
  const cursor = makeSvg("g", {});
  svg.append(cursor);
  const xs = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].filter(x.shown).sort((a, b) => a - b);
  let current = -1;
  const show = (index, event) => {
    current = index;
    const at = x(xs[index]);
    const rows = [];
    cursor.replaceChildren(makeSvg("line", { class: "cursor", x1: at, x2: at, y1: PLOT_MARGIN.top, y2: height - PLOT_MARGIN.bottom }));
    for (const line of lines) {
      const point = nearest(line.points, xs[index]);
      // A curve that has nothing near here says nothing.
      if (Math.abs(x(point.x) - at) > 12 || !y.shown(point.y)) continue;
      cursor.append(marker(line.style, x(point.x), y(point.y), 4));
      rows.push({ line, point });
    }
    rows.sort((a, b) => b.point.y - a.point.y);
    const format = spec.y.format ?? formatNumber;
    const table = make("table", {}, rows.map(({ line, point }) =>
      make("tr", {},
        make("td", {}, swatch(line.style)),
        make("td", { class: "name" }, line.name),
        make("td", { class: "number" }, format(point.y)),
        make("td", { class: "number muted" }, point.count > 1 ? `${format(point.low)} to ${format(point.high)}, ${point.count} seeds` : ""),
      )));
    tooltip.show(event, make("strong", {}, `${spec.x.label}: ${(spec.x.format ?? formatNumber)(xs[index])}`), table);
  };
  const hide = () => (cursor.replaceChildren(), tooltip.hide());
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    if (!xs.length || at < left - 10 || at > width - PLOT_MARGIN.right + 10) return hide();
    let best = 0;
    xs.forEach((value, index) => {
      if (Math.abs(x(value) - at) < Math.abs(x(xs[best]) - at)) best = index;
    });
    return show(best, event);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !xs.length) return;
    event.preventDefault();
    const index = Math.min(xs.length - 1, Math.max(0, current + move));
    const box = svg.getBoundingClientRect();
    show(index, { clientX: box.left + (x(xs[index]) / width) * box.width, clientY: box.top + box.height / 2 });
  });
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].x <= x) low = middle;
    else high = middle;
  }
  return Math.abs(points[low].x - x) <= Math.abs(points[high].x - x) ? points[low] : points[high];
}

/** Drag a rectangle to look closer; a double click or the button goes back. */
function addZoom(host, svg, x, y, left, width, height) {
  const area = frame(left, width, height);
  const within = (event) => {
    const box = svg.getBoundingClientRect();
    const clamp = (value, low, size) => Math.min(low + size, Math.max(low, value));
    return [
      clamp(((event.clientX - box.left) / box.width) * width, area.x, area.width),
      clamp(((event.clientY - box.top) / box.height) * height, area.y, area.height),
    ];
  };
  svg.addEventListener("dblclick", () => {
    if (host.zoom) ((host.zoom = null), renderPlot(host));
  });
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    event.preventDefault();
    svg.focus({ preventScroll: true });
    const start = within(event);
    const box = makeSvg("rect", { class: "selection" });
    svg.append(box);
    const move = (moved) => {
      const end = within(moved);
      const sides = { x: 0, y: 1 };
      for (const [name, n] of Object.entries(sides)) box.setAttribute(name, Math.min(start[n], end[n]));
      box.setAttribute("width", Math.abs(end[0] - start[0]));
      box.setAttribute("height", Math.abs(end[1] - start[1]));
    };
    const stop = (ended) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", stop);
      box.remove();
      const end = within(ended);
      if (Math.abs(end[0] - start[0]) < 8 || Math.abs(end[1] - start[1]) < 8) return;
      const range = (scale, n) => [scale.raw(start[n]), scale.raw(end[n])].sort((a, b) => a - b);
      host.zoom = { x: range(x, 0), y: range(y, 1) };
      tooltip.hide();
      renderPlot(host);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop);
  });
}
