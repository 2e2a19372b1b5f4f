// The report: what the reader chose is in `state` and in the controls; every section is drawn from that and the data.

const series = data.series.map((style, place) => ({ ...style, place }));
const state = {
  words: [],
  hidden: new Set(),
  sort: { column: null, descending: false },
  opened: null,
};
for (const run of data.runs) run.haystack = describeForFilter(run);

function describeForFilter(run) {
  const group = data.groups[run.group];
  const settings = Object.entries(run.settings).map(([name, value]) => `${name}=${value}`);
  const power = group.power === null ? "" : `p=${group.power}`;
  return [run.name, series[group.series].label, power, ...settings].join(" ").toLowerCase();
}

/** A word of the form name=value must equal a setting; any other word must occur somewhere. */
function matches(run) {
  return state.words.every((word) => (word.includes("=") ? ` ${run.haystack} `.includes(` ${word} `) : run.haystack.includes(word)));
}

function isHidden(run) {
  return state.hidden.has(data.groups[run.group].series);
}

function join(...parts) {
  return parts.filter(Boolean).join(", ");
}

// --- numbers over steps and seeds ------------------------------------------------------------------------------------

/** Means over the steps within a window around each point. Near the beginning, where curves are steep, the window is
    narrower, so that it stays centred; at the end it is cut off. */
function smooth(steps, values, counts, window) {
  if (!(window > 0)) return values;
  let low = 0, high = 0, weight = 0, total = 0;
  const add = (n, sign) => {
    const count = sign * (counts ? counts[n] : 1);
    weight += count;
    total += count * values[n];
  };
  return steps.map((step) => {
    const reach = Math.min(window / 2, step - steps[0]);
    while (high < steps.length && steps[high] <= step + reach) add(high++, 1);
    while (steps[low] < step - reach) add(low++, -1);
    return total / weight;
  });
}

/** Mean, lowest and highest of the numbers that are there; null if there are none. */
function spread(numbers) {
  const known = numbers.filter((x) => x !== null && x !== undefined);
  if (!known.length) return null;
  return { y: known.reduce((a, b) => a + b, 0) / known.length, low: Math.min(...known), high: Math.max(...known), count: known.length };
}

/** At every x that all curves (arrays of [x, y]) share: {x, y, low, high, count}. */
function meanAndRange(curves) {
  const found = new Map();
  for (const [x, y] of curves.flat()) found.set(x, [...(found.get(x) ?? []), y]);
  const shared = [...found].filter(([, ys]) => ys.length === curves.length);
  return shared.map(([x, ys]) => ({ x, ...spread(ys) })).sort((a, b) => a.x - b.x);
}

/** The piecewise linear function through (xs, ys), constant beyond its ends. */
function interpolate(xs, ys, x) {
  const next = xs.findIndex((at) => at >= x);
  if (next < 1) return ys[next === 0 ? 0 : ys.length - 1];
  return ys[next - 1] + ((ys[next] - ys[next - 1]) * (x - xs[next - 1])) / (xs[next] - xs[next - 1]);
}

// --- panels of lines -------------------------------------------------------------------------------------------------

const NOTHING = "No run that passes the filter has this.";
const PLOTLY_MARKERS = { circle: "circle", square: "square", diamond: "diamond", triangle: "triangle-up", cross: "x", star: "star" };

/** One line for each group of runs, with the points {x, y, low, high, count, early} that `joined` makes of all seeds' curves. */
function linesOf(groups, curveOf, joined = meanAndRange) {
  return groups.flatMap((index) => {
    const curves = data.runs.filter((run) => run.group === index && matches(run)).map(curveOf).filter((curve) => curve?.length);
    return curves.length ? [{ style: series[data.groups[index].series], points: joined(curves), curves }] : [];
  });
}

/** A panel for each power and training context, of what `lines(groups)` finds there. */
function panelsByContext(title, lines) {
  return data.panels.flatMap((panel) => {
    const contexts = [...new Set(panel.groups.map((n) => data.groups[n].context))].sort((a, b) => a - b);
    return contexts.map((context) => ({
      title: join(panel.title, `${title} ${formatNumber(context)}`), context,
      lines: lines(panel.groups.filter((n) => data.groups[n].context === context)),
    }));
  }).filter((panel) => panel.lines.length);
}

/** Shows panels {title, draw(host)} in a section, or what stands in their place. Hosts are reused, so that a zoom is kept. */
function showPanels(section, panels, instead) {
  const host = section.querySelector(".panels");
  const figures = [...host.querySelectorAll("figure")];
  figures.slice(panels.length).forEach((figure) => Plotly.purge(figure.lastElementChild));
  while (figures.length < panels.length) figures.push(make("figure", {}, make("figcaption", {}), make("div", {})));
  const shown = panels.length ? figures.slice(0, panels.length) : [typeof instead === "string" ? make("p", { class: "empty" }, instead) : instead];
  // Nodes that stay where they are keep the focus.
  if (shown.length !== host.children.length || shown[0] !== host.firstElementChild) host.replaceChildren(...shown);
  panels.forEach(({ title, draw }, n) => {
    figures[n].firstElementChild.textContent = title;
    draw(figures[n].lastElementChild);
  });
}

/** Panels of lines, whose axes are given as Plotly takes them; `look`: {markers, whiskers, seeds (a line for each), mark (the training context)}. */
function showLines(section, panels, { x, y, look = {}, key, why = NOTHING }) {
  showPanels(section, panels.map((panel) => ({
    title: panel.title || "All runs",
    draw: (host) => drawPlot(host, {
      label: `${y.title.text} against ${x.title.text}, ${panel.title}`,
      traces: panel.lines.flatMap((line) => traces(line, look)),
      layout: {
        xaxis: { ...x, hoverformat: ",.7~r", unifiedhovertitle: { text: `${x.title.text}: %{x}` } }, yaxis: { ...y, ...panel.y },
        hovermode: "x unified", hoversort: "value descending", showlegend: true, uirevision: key + panel.title,
        shapes: look.mark ? [trainingContext(panel.context)] : [],
      },
      on: { legendclick: toggleSeries, legenddoubleclick: showAlone },
    }),
  })), why);
}

function traces({ style, points, curves }, look) {
  const ink = themeColor(`series-${style.place}`);
  const shared = {
    name: plain(style.label), legendgroup: String(style.place), visible: state.hidden.has(style.place) ? "legendonly" : true,
    x: points.map((point) => point.x), type: "scatter",
  };
  const line = { color: ink, width: 2, dash: style.dash.length ? style.dash.map((n) => `${n}px`).join(",") : "solid" };
  const silent = { ...shared, mode: "lines", showlegend: false, hoverinfo: "skip" };
  const ranged = points.some((point) => point.high > point.low);
  const found = !look.seeds ? [] : curves.map((seed) => ({
    ...silent, kind: "seed", x: seed.map((point) => point.x), y: seed.map((point) => point.y), line: { ...line, width: 1 }, opacity: 0.55,
  }));
  if (ranged && !look.whiskers && !look.seeds) {
    const back = [...points].reverse();
    found.push({
      ...silent, kind: "range", x: [...points, ...back].map((point) => point.x), line: { width: 0 }, fill: "toself",
      y: [...points.map((point) => point.high), ...back.map((point) => point.low)], fillcolor: themeColor(`series-${style.place}`, 0.18),
    });
  }
  found.push({
    ...shared, kind: "mean", y: points.map((point) => point.y), line, mode: look.markers || points.length === 1 ? "lines+markers" : "lines",
    marker: { color: ink, size: 8, symbol: PLOTLY_MARKERS[style.marker] }, customdata: points.map(describePoint), hovertemplate: "%{customdata}",
    error_y: {
      visible: Boolean(ranged && look.whiskers), type: "data", symmetric: false, thickness: 1.5, width: 4,
      array: points.map((point) => point.high - point.y), arrayminus: points.map((point) => point.y - point.low),
    },
  });
  return found;
}

function describePoint({ y, low, high, count }) {
  return count > 1 ? `${formatNumber(y)}  (${formatNumber(low)} to ${formatNumber(high)}, ${count} seeds)` : formatNumber(y);
}

function trainingContext(x) {
  const color = themeColor("mark");
  return {
    type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color, width: 1, dash: "dash" },
    label: { text: "training context", textangle: 0, textposition: "end", xanchor: "right", yanchor: "top", font: { color, size: 11 } },
  };
}

/** Legends act on the whole page, not only on their own panel. A double click is two of these calls and then `showAlone`. */
function toggleSeries(event) {
  const place = Number(event.data[event.curveNumber].legendgroup);
  if (!state.hidden.delete(place)) state.hidden.add(place);
  drawSoon();
  return false;
}

function showAlone(event) {
  const place = Number(event.data[event.curveNumber].legendgroup);
  const others = series.filter((style) => style.place !== place).map((style) => style.place);
  const alone = !state.hidden.has(place) && others.every((other) => state.hidden.has(other));
  state.hidden = new Set(alone ? [] : others);
  drawSoon();
  return false;
}

function shownLines(lines) {
  return lines.filter((line) => !state.hidden.has(line.style.place));
}

/** A vertical axis that spans what is shown of these lines, without the first steps. Plotly applies it until a zoom. */
function rangeOf(lines, { log = false, fromZero = false } = {}) {
  const points = shownLines(lines).flatMap((line) => line.points.filter((point) => !point.early));
  const values = points.flatMap((point) => [point.low, point.high]).filter((y) => !log || y > 0);
  if (!values.length) return {};
  // As Plotly's ranges are, of logarithms on a logarithmic axis.
  const [low, high] = [Math.min(...values), Math.max(...values)].map((y) => (log ? Math.log10(y) : y));
  const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  const [minallowed, maxallowed] = [fromZero ? Math.min(0, low) : low - room, high + room];
  return { autorangeoptions: { minallowed, maxallowed } };
}

/** Every x of the lines of these panels, from the lowest to the highest. */
function contextsOf(panels) {
  const xs = panels.flatMap((panel) => panel.lines).flatMap((line) => line.points.map((point) => point.x));
  return [...new Set(xs)].sort((a, b) => a - b);
}

function numbersTable(panels, across) {
  const shown = panels.flatMap((panel) => shownLines(panel.lines).map((line) => ({ ...line, title: panel.title })));
  const columns = contextsOf([{ lines: shown }]);
  const rows = shown.map(({ style, points, title }) =>
    make("tr", {}, make("td", {}, title), make("td", {}, style.label), columns.map((column) => {
      const point = points.find((candidate) => candidate.x === column);
      // One column has room for the range over seeds.
      const text = !point ? "" : columns.length === 1 ? describePoint(point) : formatNumber(point.y);
      return make("td", { class: "number", title: point?.count > 1 && describePoint(point) }, text);
    })));
  return make("table", { class: "data" },
    make("thead", {}, make("tr", {}, make("th", {}), make("th", {}, across), columns.map((column) => make("th", { class: "number" }, formatNumber(column))))),
    make("tbody", {}, rows));
}

// --- final loss and speed against training context -------------------------------------------------------------------

function drawAgainstContext(id, numberOf, text, options) {
  const panels = data.panels.map((panel) => {
    const found = linesOf(panel.groups, (run) => (numberOf(run) === null ? null : [[data.groups[run.group].context, numberOf(run)]]));
    // One line for each series: its points are groups.
    const lines = [...new Set(found.map((line) => line.style))].map((style) => ({
      style, points: found.filter((line) => line.style === style).flatMap((line) => line.points).sort((a, b) => a.x - b.x),
    }));
    return { title: panel.title, lines };
  }).filter((panel) => panel.lines.length);
  const table = numbersTable(panels, "training context");
  const numbers = byId(id).querySelector(".numbers");
  const contexts = contextsOf(panels);
  if (numbers) numbers.parentElement.hidden = contexts.length === 1;
  // One training context is no axis.
  if (contexts.length === 1) return showPanels(byId(id), [], make("div", { class: "scroll" }, table));
  showLines(byId(id), panels, {
    x: { title: { text: `training context (${data.unit}s)` }, type: "log", tickvals: contexts, ticktext: contexts.map((n) => formatNumber(n)) },
    // The same range in all panels, to compare them.
    y: { title: { text }, ...rangeOf(panels.flatMap((panel) => panel.lines), options) },
    look: { markers: true, whiskers: true },
    key: text,
    why: data.runs.some((run) => numberOf(run) !== null) ? NOTHING : "No run has these numbers yet.",
  });
  numbers?.replaceChildren(table);
}

function drawFinal() {
  const kind = byId("final-kind").value;
  const text = kind === "finalLoss" ? data.metrics.loss : `held-out loss (nats per ${data.unit})`;
  drawAgainstContext("final", (run) => (run.finished ? run[kind] : null), text);
}

function drawSpeed() {
  drawAgainstContext("speed", (run) => run.speed, `${data.unit}s per second`, { fromZero: true });
}

// --- loss beyond the training context --------------------------------------------------------------------------------

/** Averages over the first few tokens are noise: contexts shorter than 1/16 of the training context are left out, if there are others. */
function evaluationCurve(run, kind) {
  const found = run.evaluation?.[kind];
  const late = found?.filter(([context]) => 16 * context >= data.groups[run.group].context);
  return kind === "byContext" && late?.length ? late : found;
}

function drawBeyond() {
  const kind = byId("beyond-kind").value;
  const across = kind === "byContext" ? `evaluation context (${data.unit}s)` : `position (${data.unit}s)`;
  const panels = panelsByContext("trained at", (groups) => linesOf(groups, (run) => evaluationCurve(run, kind)));
  showLines(byId("beyond"), panels, {
    x: powersOfTwo(across, contextsOf(panels)),
    y: { title: { text: `${kind === "byContext" ? "average loss" : "loss"} (nats per ${data.unit})` }, type: byId("beyond-log").checked ? "log" : "linear" },
    look: { markers: kind === "byContext", mark: true },
    key: kind + byId("beyond-log").checked,
    why: data.runs.some((run) => run.evaluation) ? NOTHING : "No evaluation was found. Make one with: sympow evaluate RUN/model --out RUN",
  });
  byId("beyond").querySelector(".numbers").replaceChildren(numbersTable(panels, across));
}

// --- what the state holds --------------------------------------------------------------------------------------------

/** Choices: a number of pairs to recall, or the passkey. */
function fillProbes() {
  const pairs = new Set(data.runs.flatMap((run) => run.evaluation?.recall ?? []).map((point) => point.pairs));
  const choices = [...pairs].sort((a, b) => a - b).map((n) => option(n, `associative recall of ${n} ${n === 1 ? "pair" : "pairs"}`));
  if (data.runs.some((run) => run.evaluation?.passkey.length)) choices.push(option("passkey", "passkey"));
  byId("probe").append(...choices);
  byId("probes").hidden = document.querySelector("a[href='#probes']").hidden = !choices.length;
}

/** [[distance, number]] of a run. */
function probeCurve(run, probe) {
  if (probe === "passkey") {
    // A single key has no control, and a model that diverged no loss.
    const known = (run.evaluation?.passkey ?? []).filter((point) => point.control !== null && point.loss !== null);
    return known.map((point) => [point.distance, point.control - point.loss]);
  }
  return (run.evaluation?.recall ?? [])
    .filter((point) => String(point.pairs) === probe)
    .map((point) => [Math.sqrt(Math.max(1, point.nearest) * Math.max(1, point.farthest)), point.accuracy]);
}

function drawProbes() {
  const probe = byId("probe").value;
  if (!probe) return;
  const panels = panelsByContext("trained at", (groups) => linesOf(groups, (run) => probeCurve(run, probe)));
  showLines(byId("probes"), panels, {
    x: powersOfTwo(`${data.unit}s ago`, contextsOf(panels)),
    y: { title: { text: probe === "passkey" ? "loss reduction (nats per key)" : "share recalled" }, rangemode: "tozero" },
    // Pairs are close together, far within any context.
    look: { markers: true, mark: probe === "passkey" },
    key: probe,
  });
}

// --- training curves -------------------------------------------------------------------------------------------------

/** [{x, y, step, early}] of a run, smoothed over a share of its steps. */
function runCurve(run, metric, across, share) {
  const curve = run.curves[metric];
  if (!curve || (across === "time" && !run.seconds)) return null;
  const steps = data.grids[curve.grid];
  const values = smooth(steps, curve.values, curve.counts, share * run.steps);
  const place = {
    steps: (step) => step,
    tokens: (step) => step * run.batchTokens,
    time: (step) => interpolate(data.grids[run.seconds.grid], run.seconds.values, step),
  }[across];
  const early = byId("late").checked ? run.settings.steps / 10 : 0;
  return steps.map((step, n) => ({ x: place(step), y: values[n], step, early: step < early }));
}

/** Over seeds at the same step: the mean x, and the mean, lowest and highest y. */
function joinSeeds(curves) {
  const xs = new Map(meanAndRange(curves.map((curve) => curve.map((point) => [point.step, point.x]))).map((point) => [point.x, point.y]));
  const early = new Set(curves[0].filter((point) => point.early).map((point) => point.step));
  return meanAndRange(curves.map((curve) => curve.map((point) => [point.step, point.y])))
    .map((point) => ({ ...point, x: xs.get(point.x), early: early.has(point.x) }));
}

function drawCurves() {
  const metric = byId("metric").value, across = byId("curve-x").value;
  const share = byId("smoothing").value / 100;
  const [logX, logY] = [byId("curve-log-x").checked, byId("curve-log-y").checked];
  const longest = Math.max(...data.runs.map((run) => run.steps));
  byId("smoothing-value").textContent = share ? `over ${formatNumber(Math.max(1, Math.round(share * longest)))} steps` : "none";
  const panels = panelsByContext("training context", (groups) => linesOf(groups, (run) => runCurve(run, metric, across, share), joinSeeds));
  const x = { title: { text: { steps: "step", tokens: `${data.unit}s`, time: "time on steps" }[across] } };
  if (across === "time") {
    const most = Math.max(...panels.flatMap((panel) => panel.lines.flatMap((line) => line.points.map((point) => point.x))));
    const [unit, seconds] = [["h", 3600], ["min", 60], ["s", 1]].find(([, size]) => most >= 1.5 * size) ?? ["s", 1];
    x.ticksuffix = ` ${unit}`;
    for (const line of panels.flatMap((panel) => panel.lines)) for (const point of [line.points, line.curves].flat(2)) point.x /= seconds;
  }
  for (const panel of panels) panel.y = rangeOf(panel.lines, { log: logY });
  showLines(byId("curves"), panels, {
    x: { ...x, type: logX ? "log" : "linear" },
    y: { title: { text: data.metrics[metric] }, type: logY ? "log" : "linear" },
    look: { seeds: byId("each-seed").checked },
    key: [metric, across, logX, logY, byId("late").checked].join(),
  });
}

// --- gates and rotations ---------------------------------------------------------------------------------------------

function hasHeads(run) {
  return Boolean(run.heads && Object.keys(run.heads.quantities).length) || Object.keys(run.layers).length > 0;
}

function fillHeadRuns() {
  const select = byId("head-run");
  const kept = select.value;
  const runs = data.runs.map((run, n) => [n, run]).filter(([, run]) => hasHeads(run) && matches(run));
  select.replaceChildren(...runs.map(([n, run]) => {
    const group = data.groups[run.group];
    const power = group.power === null ? "" : `p = ${group.power}`;
    return option(n, join(series[group.series].label, power, `context ${formatNumber(group.context)}`, `seed ${run.seed}`), String(n) === kept);
  }));
  // At first, the run with the most quantities.
  if (!runs.length || runs.some(([n]) => String(n) === kept)) return;
  const quantities = ([, run]) => Object.keys(run.heads?.quantities ?? {}).length;
  select.value = runs.reduce((best, run) => (quantities(run) > quantities(best) ? run : best))[0];
}

function labelOf(quantity) {
  return data.quantities[quantity] ?? quantity.replaceAll("_", " ");
}

function fillQuantities(run) {
  const select = byId("head-quantity");
  const kept = select.value;
  const names = [...new Set([...Object.keys(run?.heads?.quantities ?? {}), ...Object.keys(run?.layers ?? {})])];
  select.replaceChildren(...names.map((name) => option(name, labelOf(name), name === kept)));
}

function drawHeads() {
  fillHeadRuns();
  const run = data.runs[byId("head-run").value];
  fillQuantities(run);
  const quantity = byId("head-quantity").value;
  const panels = [];
  if (run && quantity) {
    const forgetting = quantity.startsWith("half_life");
    const look = {
      log: forgetting, aroundOne: quantity === "beta_mean" || quantity === "rate_change",
      domain: quantity === "beta_mean" ? [0, 2] : undefined, rowTitle: "layer",
    };
    const say = (value) => (value === null ? (forgetting ? "never forgets" : "no number") : `${labelOf(quantity)} ${formatNumber(value)}`);
    const add = (title, columnTitle, columns, values, note) => panels.push({
      title,
      draw: (host) => drawHeatMap(host, {
        ...look, label: `${labelOf(quantity)}: ${title}`, values, columns, columnTitle,
        describe: (r, c, value) => `layer ${r}, ${columnTitle} ${columns[c]}: ${say(value)}${note}`,
      }),
    });
    const rows = run.heads?.quantities[quantity], layers = run.layers[quantity];
    if (rows) {
      const columnTitle = quantity === "rate_change" ? "rotated pair" : "head";
      const columns = [...Array(Math.max(...rows.map((row) => row.length))).keys()];
      add(`By layer and ${columnTitle}`, columnTitle, columns, rows, ` (${formatNumber(run.heads.tokens)} held-out ${data.unit}s)`);
    }
    if (layers) add("By layer over training", "step", layers.steps.map((step) => formatNumber(step)), layers.values, "");
  }
  showPanels(byId("heads"), panels, data.runs.some(hasHeads) ? NOTHING : "No run has gates or learned rotations.");
}

// --- the table of runs -----------------------------------------------------------------------------------------------

const NUMBERS = [
  { label: "final loss", number: (run) => run.finalLoss },
  { label: "held-out loss", number: (run) => run.finalHeldoutLoss },
  { label: `${data.unit}s/s`, number: (run) => run.speed },
  { label: "memory, GiB", number: (run) => run.memory },
  { label: "parameters", number: (run) => run.parameters },
];

function tableColumns() {
  const settings = data.settings.filter((setting) => setting.differs || byId("all-settings").checked);
  return [
    { label: "run", text: (run) => run.name },
    { label: "series", text: (run) => series[data.groups[run.group].series].label },
    { label: "steps made", number: (run) => run.steps, text: (run) => formatNumber(run.steps) + (run.finished ? "" : ", unfinished") },
    ...(data.runs.some((run) => run.device) ? [{ label: "device", text: (run) => run.device ?? "" }] : []),
    ...NUMBERS.filter((column) => data.runs.some((run) => column.number(run) !== null)),
    ...settings.map((setting) => ({
      label: setting.label, help: setting.help, setting: setting.name, text: (run) => run.settings[setting.name] ?? "",
      common: setting.differs ? commonest(data.runs.map((run) => run.settings[setting.name])) : null,
    })),
  ];
}

function commonest(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].reduce((best, entry) => (entry[1] > best[1] ? entry : best))[0];
}

function drawTable() {
  const columns = tableColumns();
  const runs = data.runs.filter((run) => matches(run) && !isHidden(run));
  const { column: sorted, descending } = state.sort;
  const by = columns.find((column) => column.label === sorted);
  if (by) {
    const value = (run) => (by.number ? by.number(run) ?? Infinity : isNumeric(by.text(run)) ? Number(by.text(run)) : by.text(run));
    runs.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (descending ? -1 : 1));
  }
  const head = columns.map((column) => {
    const sort = () => {
      state.sort = { column: column.label, descending: sorted === column.label && !descending };
      drawTable();
    };
    const order = sorted === column.label ? (descending ? "descending" : "ascending") : "none";
    const arrow = { ascending: " ▲", descending: " ▼", none: "" }[order];
    return make("th", { class: column.number ? "number" : false, "aria-sort": order, title: column.help || false },
      make("button", { type: "button", onclick: sort }, column.label + arrow));
  });
  const rows = runs.flatMap((run) => {
    const open = () => ((state.opened = state.opened === run ? null : run), drawTable());
    const cells = columns.map((column, n) => {
      const text = column.text ? column.text(run) : formatNumber(column.number(run));
      const different = column.setting && column.common !== null && text !== column.common;
      const name = make("button", { type: "button", "aria-expanded": String(state.opened === run), onclick: open }, text);
      return make("td", { class: column.number ? "number" : different ? "different" : false }, n === 0 ? name : text);
    });
    const row = make("tr", { "data-run": run.name }, cells);
    if (state.opened !== run) return [row];
    return [row, make("tr", {}, make("td", { colspan: columns.length }, "Command: ", make("code", { class: "command" }, run.command)))];
  });
  byId("run-table").replaceChildren(make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
}

function isNumeric(text) {
  return text !== "" && Number.isFinite(Number(text));
}

// --- the whole page --------------------------------------------------------------------------------------------------

function drawAll() {
  const shown = data.runs.filter((run) => matches(run) && !isHidden(run)).length;
  byId("shown").textContent = shown === data.runs.length ? `${shown} runs` : `${shown} of ${data.runs.length} runs`;
  for (const drawSection of [drawFinal, drawBeyond, drawProbes, drawCurves, drawHeads, drawSpeed, drawTable]) drawSection();
}

let waiting;

/** Draws the page once after a series of key strokes or clicks. */
function drawSoon() {
  clearTimeout(waiting);
  waiting = setTimeout(drawAll, 300);
}

function start() {
  byId("title").textContent = data.title;
  for (const place of document.querySelectorAll(".units")) place.textContent = `${data.unit}s`;
  const seeds = new Set(data.runs.map((run) => run.seed)).size;
  byId("summary").textContent = `${data.runs.length} runs of ${data.groups.length} configs with ${seeds} ${seeds === 1 ? "seed" : "seeds"}`;
  showNotes(data.notes);
  byId("metric").append(...Object.entries(data.metrics).map(([name, label]) => option(name, label, name === "loss")));
  fillProbes();
  if (!data.runs.some((run) => run.finalHeldoutLoss !== null)) byId("final-kind").lastElementChild.disabled = true;
  const same = data.settings.filter((setting) => !setting.differs);
  byId("same").textContent = same.map((setting) => `${setting.label}: ${data.runs[0].settings[setting.name]}`).join(" · ");

  startTheme(drawAll);
  byId("filter").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    drawSoon();
  });
  const redraw = {
    "final-kind": drawFinal, "beyond-kind": drawBeyond, "beyond-log": drawBeyond, probe: drawProbes, metric: drawCurves, "curve-x": drawCurves,
    "curve-log-x": drawCurves, "curve-log-y": drawCurves, "each-seed": drawCurves, late: drawCurves, smoothing: drawCurves,
    "head-run": drawHeads, "head-quantity": drawHeads, "all-settings": drawTable,
  };
  for (const [id, drawSection] of Object.entries(redraw)) byId(id).addEventListener("input", drawSection);
  drawAll();
}

start();
