// The report: Python wrote the page, the table of runs and the curve of every run. Here the runs that pass the filter are
// smoothed, joined over seeds and drawn as the reader chose.

const NOTHING = "No run that passes the filter has this.";
const sections = [...document.querySelectorAll("section")];
const rows = [...document.querySelectorAll("#run-table tbody tr")];
// Words of the filter, places of the hidden series, and the column by which the table is sorted (sign: 1 ascending).
const state = { words: [], hidden: new Set(), sort: null };

/** A word of the form name=value must equal a setting; any other word must occur somewhere. */
function matches(run) {
  return state.words.every((word) => (word.includes("=") ? ` ${run.words} `.includes(` ${word} `) : run.words.includes(word)));
}

const isShown = (run) => matches(run) && !state.hidden.has(run.series);

/** What the reader chose in the controls of a section, by their names. */
function optionsOf(section) {
  return Object.fromEntries([...section.querySelectorAll("[name]")].map((control) =>
    [control.name, control.type === "checkbox" ? control.checked : control.value]));
}

const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;

/** Means over the steps within a window around each point. Near the beginning, where curves are steep, the window is
    narrower, so that it stays centred; at the end it is cut off. */
function smooth(steps, values, counts, window) {
  return steps.map((step) => {
    const reach = Math.min(window / 2, step - steps[0]);
    let weight = 0, total = 0;
    steps.forEach((other, n) => {
      if (Math.abs(other - step) > reach) return;
      weight += counts?.[n] ?? 1;
      total += (counts?.[n] ?? 1) * values[n];
    });
    return total / weight;
  });
}

/** The points of one run's curve, which are joined with those of other seeds at the same step. */
function pointsOf(curve, { across = "steps", smoothing = 0, late = false }) {
  const run = data.runs[curve.run], steps = data.grids[curve.grid];
  if (across === "time" && curve.time === null) return [];
  const xs = { steps, tokens: steps.map((step) => step * run.batchTokens), time: data.grids[curve.time] }[across];
  const ys = smoothing > 0 ? smooth(steps, curve.y, curve.counts, (smoothing / 100) * run.steps) : curve.y;
  return steps.map((step, n) => ({ step, x: xs[n], y: ys[n], early: late && step < run.planned / 10 }));
}

/** At every step that all seeds have: the mean x and y, and the lowest and the highest y, of the numbers that are there. */
function join(seeds) {
  const found = new Map();
  for (const point of seeds.flat()) found.set(point.step, [...(found.get(point.step) ?? []), point]);
  return [...found.values()].filter((points) => points.length === seeds.length).sort(([a], [b]) => a.step - b.step).map((points) => {
    const ys = points.map((point) => point.y).filter((y) => y !== null);
    return {
      x: mean(points.map((point) => point.x)), y: ys.length ? mean(ys) : null, early: points[0].early,
      low: Math.min(...ys), high: Math.max(...ys), count: ys.length,
    };
  });
}

/** The panels of a view with lines {series, points, seeds} of the runs that pass the filter, without what is empty then. */
function panelsOf(view, options) {
  return view.panels.map((panel) => ({
    ...panel,
    lines: panel.lines.map(({ series, configs }) => {
      const curves = configs.map((config) => config.filter((curve) => matches(data.runs[curve.run])).map((curve) => pointsOf(curve, options)));
      const seeds = curves.map((config) => config.filter((points) => points.length));
      return { series, seeds: seeds.flat(), points: seeds.flatMap(join) };
    }).filter((line) => line.points.length),
  })).filter((panel) => panel.lines.length);
}

function drawLines(section) {
  const options = optionsOf(section);
  const view = data.views[section.id][options.choice ?? ""] ?? { panels: [] };
  const panels = panelsOf(view, options);
  const every = panels.flatMap((panel) => panel.lines);
  // One training context is no axis.
  const single = view.contexts && xsOf(every).length === 1;
  const numbers = section.querySelector(".numbers");
  if (numbers) numbers.parentElement.hidden = single;
  if (numbers && !single) numbers.replaceChildren(numbersTable(view, panels));
  // What a zoom does not outlast.
  const { smoothing, seeds, ...kept } = options;
  const x = options.across ? view.x[options.across] : view.x;
  showPanels(section, single ? [] : panels.map(({ title, lines, shapes }) => ({
    title: title || "All runs",
    plot: {
      label: `${view.y.title.text} against ${x.title.text}, ${title}`,
      traces: lines.flatMap((line) => traces(line, view.look, seeds)),
      layout: {
        ...data.layout, shapes, uirevision: JSON.stringify([kept, title]),
        xaxis: { type: options.logX ? "log" : "linear", ...x },
        // The same range in all panels, to compare them, or one of each panel.
        yaxis: { ...view.y, type: options.logY ? "log" : "linear", ...(view.range && rangeOf(view.range === "shared" ? every : lines, options, view)) },
      },
    },
    listeners: { legendclick: toggleSeries, legenddoubleclick: showAlone },
  })), single && make("div", { class: "scroll" }, numbersTable(view, panels)));
}

/** Shows panels {title, plot, listeners} in a section, or what stands in their place. Hosts are reused, so that a zoom is kept. */
function showPanels(section, panels, instead) {
  const host = section.querySelector(".panels");
  const figures = [...host.querySelectorAll("figure")];
  figures.slice(panels.length).forEach((figure) => Plotly.purge(figure.lastElementChild));
  while (figures.length < panels.length) figures.push(make("figure", {}, make("figcaption"), make("div")));
  const empty = instead || make("p", { class: "empty" }, section.dataset.empty || NOTHING);
  const shown = panels.length ? figures.slice(0, panels.length) : [empty];
  // Nodes that stay where they are keep the focus.
  if (shown.length !== host.children.length || shown[0] !== host.firstElementChild) host.replaceChildren(...shown);
  panels.forEach(({ title, plot, listeners }, n) => {
    figures[n].firstElementChild.textContent = title;
    drawPlot(figures[n].lastElementChild, plot, listeners);
  });
}

/** Traces of a line, which Python described but for their points: each seed or the range over seeds, and the mean. */
function traces({ series, points, seeds }, { markers, whiskers }, eachSeed) {
  const look = data.series[series];
  const visible = state.hidden.has(series) ? "legendonly" : true;
  const through = (ends) => ({ visible, x: ends.map((point) => point.x), y: ends.map((point) => point.y) });
  const ranged = points.some((point) => point.high > point.low);
  const found = eachSeed ? seeds.map((seed) => ({ ...look.seed, ...through(seed) })) : [];
  if (ranged && !whiskers && !eachSeed) {
    const [tops, bottoms] = [points.map(({ x, high }) => ({ x, y: high })), points.map(({ x, low }) => ({ x, y: low }))];
    found.push({ ...look.range, ...through([...tops, ...bottoms.reverse()]) });
  }
  found.push({
    ...look.mean, ...through(points), mode: markers || points.length === 1 ? "lines+markers" : "lines", customdata: points.map(describePoint),
    error_y: {
      visible: Boolean(ranged && whiskers), type: "data", symmetric: false, thickness: 1.5, width: 4,
      array: points.map((point) => point.high - point.y), arrayminus: points.map((point) => point.y - point.low),
    },
  });
  return found;
}

function describePoint({ y, low, high, count }) {
  return count > 1 ? `${formatNumber(y)}  (${formatNumber(low)} to ${formatNumber(high)}, ${count} seeds)` : formatNumber(y);
}

/** Legends act on the whole page, not only on their own panel. A double click is two of these calls and then `showAlone`. */
function toggleSeries(event) {
  const place = Number(event.data[event.curveNumber].legendgroup);
  if (!state.hidden.delete(place)) state.hidden.add(place);
  return drawSoon();
}

function showAlone(event) {
  const place = Number(event.data[event.curveNumber].legendgroup);
  const others = [...data.series.keys()].filter((other) => other !== place);
  const alone = !state.hidden.has(place) && others.every((other) => state.hidden.has(other));
  state.hidden = new Set(alone ? [] : others);
  return drawSoon();
}

const shownLines = (lines) => lines.filter((line) => !state.hidden.has(line.series));

/** A vertical axis that spans what is shown of these lines, without the first steps. Plotly applies it until a zoom. */
function rangeOf(lines, { logY }, { fromZero }) {
  const points = shownLines(lines).flatMap((line) => line.points.filter((point) => !point.early));
  const values = points.flatMap((point) => [point.low, point.high]).filter((y) => Number.isFinite(y) && (!logY || y > 0));
  if (!values.length) return {};
  // As Plotly's ranges are, of logarithms on a logarithmic axis.
  const [low, high] = [Math.min(...values), Math.max(...values)].map((y) => (logY ? Math.log10(y) : y));
  const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return { autorangeoptions: { minallowed: fromZero ? Math.min(0, low) : low - room, maxallowed: high + room } };
}

/** Every x of these lines, from the lowest to the highest. */
const xsOf = (lines) => [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);

function numbersTable(view, panels) {
  const shown = panels.flatMap((panel) => shownLines(panel.lines).map((line) => ({ ...line, title: panel.title })));
  const columns = xsOf(shown);
  const body = shown.map(({ series, points, title }) => make("tr", {}, make("td", {}, title), make("td", {}, data.series[series].label), columns.map((column) => {
    const point = points.find((candidate) => candidate.x === column);
    // One column has room for the range over seeds.
    const text = !point ? "" : columns.length === 1 ? describePoint(point) : formatNumber(point.y);
    return make("td", { class: "number", title: point?.count > 1 && describePoint(point) }, text);
  })));
  const head = make("tr", {}, make("th"), make("th", {}, view.across), columns.map((column) => make("th", { class: "number" }, formatNumber(column))));
  return make("table", { class: "data" }, make("thead", {}, head), make("tbody", {}, body));
}

function drawHeads(section) {
  fill(byId("head-run"), data.heads.flatMap(({ run, label }, n) => (matches(data.runs[run]) ? [[n, label]] : [])));
  const maps = data.heads[byId("head-run").value]?.maps ?? {};
  fill(byId("head-quantity"), Object.entries(maps).map(([name, { label }]) => [name, label]));
  showPanels(section, maps[byId("head-quantity").value]?.panels ?? []);
}

function drawTable() {
  const shown = rows.filter((row) => isShown(data.runs[row.dataset.place]));
  if (state.sort) {
    const { column, sign } = state.sort;
    const value = ({ cells: { [column]: cell } }) => cell.dataset.value ?? cell.textContent;
    shown.sort((a, b) => sign * compare(value(a), value(b)));
  }
  byId("run-table").tBodies[0].replaceChildren(...shown);
}

/** Numbers before words, by size; what is empty comes last. */
function compare(a, b) {
  if (a === "" || b === "") return (a === "") - (b === "");
  return Number(a) - Number(b) || a.localeCompare(b);
}

byId("run-table").tHead.addEventListener("click", ({ target }) => {
  const cell = target.closest("th");
  const order = cell.ariaSort === "ascending" ? "descending" : "ascending";
  for (const other of cell.parentElement.cells) other.ariaSort = other === cell ? order : "none";
  state.sort = { column: cell.cellIndex, sign: order === "ascending" ? 1 : -1 };
  drawTable();
});

const draw = (section) => ({ heads: drawHeads, runs: drawTable }[section.id] ?? drawLines)(section);

function drawAll() {
  const shown = data.runs.filter(isShown).length;
  byId("shown").textContent = shown === data.runs.length ? `${shown} runs` : `${shown} of ${data.runs.length} runs`;
  sections.forEach(draw);
}

/** Draws the page once after a series of key strokes or clicks, and keeps Plotly from its own reaction to a click. */
function drawSoon() {
  clearTimeout(state.waiting);
  state.waiting = setTimeout(drawAll, 300);
  return false;
}

function showSmoothing() {
  const steps = (byId("smoothing").value / 100) * Math.max(...data.runs.map((run) => run.steps));
  byId("smoothing-value").textContent = steps ? `over ${formatNumber(Math.max(1, Math.round(steps)))} steps` : "none";
}

byId("filter").addEventListener("input", ({ target }) => {
  state.words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
  drawSoon();
});
for (const section of sections) section.addEventListener("input", () => draw(section));
byId("smoothing").addEventListener("input", showSmoothing);
showSmoothing();
drawAll();
