// The report: reads the data once, keeps what the reader chose in `state`, and draws sections from both.

const data = pageData();
const series = data.series.map((style, place) => ({ ...style, place, colour: `var(--series-${place})` }));
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

// --- what is shown -------------------------------------------------------------------------------------------------

/** A word like name=value must be all of a setting; any other must occur somewhere. */
function matches(run) {
  return state.words.every((word) => (word.includes("=") ? ` ${run.haystack} `.includes(` ${word} `) : run.haystack.includes(word)));
}

/** Runs of a group that pass the filter, or none if its series is hidden. */
function shownRuns(groupIndex) {
  const group = data.groups[groupIndex];
  if (state.hidden.has(group.series)) return [];
  return data.runs.filter((run) => run.group === groupIndex && matches(run));
}

function seriesOf(groups) {
  const present = new Set(groups.filter((n) => data.runs.some((run) => run.group === n && matches(run))).map((n) => data.groups[n].series));
  return series.filter((style) => present.has(style.place));
}

/** A section's legend and panels; panels are reused, so that a zoom survives. */
function drawPanels(section, panels, groups, why) {
  const legend = section.querySelector(".legend");
  if (legend) drawLegend(legend, seriesOf(groups), state.hidden, drawAll);
  const host = section.querySelector(".panels");
  if (!panels.length) return void host.replaceChildren(make("p", { class: "empty" }, why));
  host.querySelectorAll(".empty").forEach((element) => element.remove());
  while (host.children.length > panels.length) host.lastElementChild.remove();
  while (host.children.length < panels.length) host.append(make("figure", {}, make("figcaption", {}), make("div", {})));
  panels.forEach(({ title, draw }, n) => {
    host.children[n].querySelector("figcaption").textContent = title;
    draw(host.children[n].lastElementChild);
  });
}

const NOTHING = "No run that is shown has this. Show more series, or clear the filter.";

// --- final loss and speed against training context -----------------------------------------------------------------

function againstContext(groups, numberOf) {
  const lines = new Map();
  for (const index of groups) {
    const found = spread(shownRuns(index).map(numberOf));
    if (!found) continue;
    const { series: place, context } = data.groups[index];
    if (!lines.has(place)) lines.set(place, []);
    lines.get(place).push({ x: context, y: found.mean, low: found.low, high: found.high, count: found.count });
  }
  // A little apart, so that bars do not hide each other.
  return [...lines].map(([place, points], n) => ({
    shift: 5 * (n - (lines.size - 1) / 2),
    style: series[place], name: series[place].label, markers: true, whiskers: true, points: points.sort((a, b) => a.x - b.x),
  }));
}

function drawAgainstContext(id, numberOf, y, tables) {
  const panels = data.panels
    .map((panel) => ({ title: panel.title, lines: againstContext(panel.groups, numberOf) }))
    .filter((panel) => panel.lines.length);
  // The same range in all panels, to compare them.
  const values = panels.flatMap((panel) => panel.lines.flatMap((line) => line.points.flatMap((point) => [point.low, point.high])));
  const domain = values.length ? [Math.min(...values), Math.max(...values)] : null;
  const contexts = [...new Set(data.groups.map((group) => group.context))].sort((a, b) => a - b);
  const groups = data.groups.map((_, n) => n);
  drawPanels(byId(id), panels.map((panel) => ({
    title: panel.title || "All runs",
    draw: (host) => drawPlot(host, {
      label: `${y.label} against training context, ${panel.title}`,
      x: { label: `training context (${data.unit}s)`, log: true, base: 2, ticks: contexts },
      y: { ...y, domain },
      lines: panel.lines,
      key: y.label,
    }),
  })), groups, data.runs.some((run) => numberOf(run) !== null) ? NOTHING : "No run has these numbers yet.");
  if (tables) byId(id).querySelector(".numbers").replaceChildren(numbersTable(panels, "training context"));
}

function numbersTable(panels, across) {
  const columns = [...new Set(panels.flatMap((panel) => panel.lines.flatMap((line) => line.points.map((point) => point.x))))].sort((a, b) => a - b);
  const rows = panels.flatMap((panel) => panel.lines.map((line) =>
    make("tr", {}, make("td", {}, panel.title), make("td", {}, line.name), columns.map((column) => {
      const point = line.points.find((candidate) => candidate.x === column);
      const range = point && point.count > 1 ? `${formatNumber(point.low)} to ${formatNumber(point.high)}, ${point.count} seeds` : false;
      return make("td", { class: "number", title: range }, point ? formatNumber(point.y) : "");
    }))));
  return make("table", { class: "data" },
    make("thead", {}, make("tr", {}, make("th", {}, ""), make("th", {}, across), columns.map((column) => make("th", { class: "number" }, formatNumber(column))))),
    make("tbody", {}, rows));
}

function drawFinal() {
  const kind = byId("final-kind").value;
  const label = kind === "finalLoss" ? data.metrics.loss : `held-out loss (nats per ${data.unit})`;
  drawAgainstContext("final", (run) => (run.finished ? run[kind] : null), { label }, true);
}

function drawSpeed() {
  drawAgainstContext("speed", (run) => run.speed, { label: `${data.unit}s per second`, fromZero: true }, false);
}

// --- loss beyond the training context ------------------------------------------------------------------------------

function drawBeyond() {
  const kind = byId("beyond-kind").value;
  const label = kind === "byContext" ? `average loss (nats per ${data.unit})` : `loss (nats per ${data.unit})`;
  const across = kind === "byContext" ? `evaluation context (${data.unit}s)` : `position (${data.unit}s)`;
  const panels = [];
  for (const panel of data.panels) {
    for (const context of contextsOf(panel.groups)) {
      const lines = [];
      for (const index of panel.groups.filter((n) => data.groups[n].context === context)) {
        const curves = shownRuns(index).map((run) => run.evaluation?.[kind]).filter((curve) => curve?.length);
        const style = series[data.groups[index].series];
        if (curves.length) lines.push({ style, name: style.label, points: meanAndRange(curves), markers: kind === "byContext" });
      }
      if (lines.length) panels.push({ title: join(panel.title, `trained at ${formatNumber(context)}`), context, lines });
    }
  }
  const evaluated = data.runs.some((run) => run.evaluation);
  const groups = data.groups.map((_, n) => n).filter((n) => data.runs.some((run) => run.group === n && run.evaluation));
  drawPanels(byId("beyond"), panels.map((panel) => ({
    title: panel.title,
    draw: (host) => drawPlot(host, {
      label: `${label} against ${across}, ${panel.title}`,
      x: { label: across, log: true, base: 2 },
      y: { label, log: byId("beyond-log").checked },
      lines: panel.lines,
      marks: [{ x: panel.context, label: "training context" }],
      key: kind + byId("beyond-log").checked + panel.title,
    }),
  })), groups, evaluated ? NOTHING : "No evaluation was found. Make one with: sympow evaluate RUN/model --out RUN");
  byId("beyond").querySelector(".numbers").replaceChildren(numbersTable(panels, across));
}

// --- what the state holds ------------------------------------------------------------------------------------------

function hasProbes(run) {
  return Boolean(run.evaluation?.recall.length || run.evaluation?.passkey.length);
}

/** Choices: a number of pairs to recall, or the key. */
function fillProbes() {
  const pairs = new Set(data.runs.flatMap((run) => run.evaluation?.recall ?? []).map((point) => point.pairs));
  const choices = [...pairs].sort((a, b) => a - b).map((n) => option(n, `associative recall of ${n} ${n === 1 ? "pair" : "pairs"}`));
  if (data.runs.some((run) => run.evaluation?.passkey.length)) choices.push(option("passkey", "passkey"));
  byId("probe").append(...choices);
  const there = choices.length > 0;
  byId("probes").hidden = document.querySelector("a[href='#probes']").hidden = !there;
}

/** [[distance, number]] of a run. */
function probeCurve(run, probe) {
  if (probe === "passkey") return (run.evaluation?.passkey ?? []).map((point) => [point.distance, point.control - point.loss]);
  return (run.evaluation?.recall ?? [])
    .filter((point) => String(point.pairs) === probe)
    .map((point) => [Math.sqrt(Math.max(1, point.nearest) * Math.max(1, point.farthest)), point.accuracy]);
}

function drawProbes() {
  const probe = byId("probe").value;
  const label = probe === "passkey" ? "gained by being told (nats per key)" : "share recalled";
  const panels = [];
  for (const panel of data.panels) {
    for (const context of contextsOf(panel.groups)) {
      const lines = [];
      for (const index of panel.groups.filter((n) => data.groups[n].context === context)) {
        const curves = shownRuns(index).map((run) => probeCurve(run, probe)).filter((curve) => curve.length);
        const style = series[data.groups[index].series];
        if (curves.length) lines.push({ style, name: style.label, points: meanAndRange(curves), markers: true });
      }
      if (lines.length) panels.push({ title: join(panel.title, `trained at ${formatNumber(context)}`), context, lines });
    }
  }
  const groups = data.groups.map((_, n) => n).filter((n) => data.runs.some((run) => run.group === n && hasProbes(run)));
  drawPanels(byId("probes"), panels.map((panel) => ({
    title: panel.title,
    draw: (host) => drawPlot(host, {
      label: `${label} against distance, ${panel.title}`,
      x: { label: `${data.unit}s ago`, log: true },
      y: { label, fromZero: true },
      lines: panel.lines,
      // Pairs stand close together, far within any context.
      marks: probe === "passkey" ? [{ x: panel.context, label: "training context" }] : [],
      key: probe + panel.title,
    }),
  })), groups, NOTHING);
}

function contextsOf(groups) {
  return [...new Set(groups.map((n) => data.groups[n].context))].sort((a, b) => a - b);
}

function join(...parts) {
  return parts.filter(Boolean).join(", ");
}

// --- training curves -----------------------------------------------------------------------------------------------

/** [[x, y, step]] of a run, smoothed over a part of its steps. */
function runCurve(run, metric, across, part) {
  const curve = run.curves[metric];
  if (!curve) return null;
  const steps = data.grids[curve.grid];
  const values = smooth(steps, curve.values, curve.counts, part * run.steps);
  if (across === "time" && !run.seconds) return null;
  const place = {
    steps: (step) => step,
    tokens: (step) => step * run.batchTokens,
    time: (step) => interpolate(data.grids[run.seconds.grid], run.seconds.values, step),
  }[across];
  const early = byId("late").checked ? run.settings.steps / 10 : 0;
  return steps.map((step, n) => ({ x: place(step), y: values[n], step, early: step < early }));
}

/** Over seeds at the same step: mean place, mean, lowest, highest. */
function joinSeeds(curves) {
  const bySteps = meanAndRange(curves.map((curve) => curve.map((point) => [point.step, point.y])));
  const places = new Map(meanAndRange(curves.map((curve) => curve.map((point) => [point.step, point.x]))).map((point) => [point.x, point.y]));
  const early = new Set(curves[0].filter((point) => point.early).map((point) => point.step));
  return bySteps.map((point) => ({ ...point, x: places.get(point.x), early: early.has(point.x) }));
}

function drawCurves() {
  const metric = byId("metric").value;
  const across = byId("curve-x").value;
  const part = byId("smoothing").value / 100;
  const eachSeed = byId("each-seed").checked;
  const longest = Math.max(...data.runs.map((run) => run.steps));
  byId("smoothing-value").textContent = part ? `over ${formatNumber(Math.max(1, Math.round(part * longest)))} steps` : "none";
  const panels = [];
  for (const panel of data.panels) {
    for (const context of contextsOf(panel.groups)) {
      const lines = [];
      for (const index of panel.groups.filter((n) => data.groups[n].context === context)) {
        const style = series[data.groups[index].series];
        const curves = shownRuns(index).map((run) => runCurve(run, metric, across, part)).filter(Boolean);
        if (!curves.length) continue;
        const joined = joinSeeds(curves);
        if (eachSeed) {
          for (const points of curves) lines.push({ style, name: style.label, points, faint: true });
          lines.push({ style, name: style.label, points: joined.map((point) => ({ ...point, low: point.y, high: point.y })) });
        } else {
          lines.push({ style, name: style.label, points: joined });
        }
      }
      if (lines.length) panels.push({ title: join(panel.title, `training context ${formatNumber(context)}`), lines });
    }
  }
  const label = data.metrics[metric];
  const axes = {
    steps: { label: "step" },
    tokens: { label: `${data.unit}s` },
    time: { label: "time on steps", format: formatSeconds, formatTick: formatSeconds },
  };
  const logX = byId("curve-log-x").checked, logY = byId("curve-log-y").checked;
  drawPanels(byId("curves"), panels.map((panel) => ({
    title: panel.title,
    draw: (host) => drawPlot(host, {
      label: `${label} against ${across}, ${panel.title}`,
      x: { ...axes[across], log: logX },
      y: { label, log: logY },
      lines: panel.lines,
      key: [metric, across, logX, logY, byId("late").checked, panel.title].join(),
    }),
  })), data.groups.map((_, n) => n), NOTHING);
}

// --- gates and rotations -------------------------------------------------------------------------------------------

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
  // The richest run is the one to begin with.
  if (!runs.some(([n]) => String(n) === kept)) {
    const richest = runs.reduce((best, [n, run]) => {
      const count = Object.keys(run.heads?.quantities ?? {}).length;
      return count > best.count ? { n, count } : best;
    }, { n: null, count: -1 });
    if (richest.n !== null) select.value = richest.n;
  }
}

function fillQuantities(run) {
  const select = byId("head-quantity");
  const kept = select.value;
  const names = [...new Set([...Object.keys(run?.heads?.quantities ?? {}), ...Object.keys(run?.layers ?? {})])];
  select.replaceChildren(...names.map((name) => option(name, data.quantities[name] ?? name.replaceAll("_", " "), name === kept)));
}

function heatLook(quantity) {
  if (quantity === "beta_mean") return { ramp: "aroundOne", domain: [0, 2] };
  if (quantity === "rate_change") return { ramp: "aroundOne" };
  return { log: quantity.startsWith("half_life") };
}

function drawHeads() {
  fillHeadRuns();
  const run = data.runs[byId("head-run").value];
  fillQuantities(run);
  const quantity = byId("head-quantity").value;
  const panels = [];
  if (run && quantity) {
    const name = data.quantities[quantity] ?? quantity.replaceAll("_", " ");
    const look = heatLook(quantity);
    const never = quantity.startsWith("half_life") ? "never forgets" : "no number";
    const rows = run.heads?.quantities[quantity];
    if (rows) {
      const columnTitle = quantity === "rate_change" ? "rotated pair" : "head";
      const columns = [...Array(Math.max(...rows.map((row) => row.length))).keys()];
      panels.push({
        title: `By layer and ${columnTitle}`,
        draw: (host) => drawHeatMap(host, {
          ...look, label: `${name} by layer and ${columnTitle}`, values: rows, rows: rows.map((_, n) => n), columns, rowTitle: "layer", columnTitle,
          describe: (r, c, value) => `layer ${r}, ${columnTitle} ${c}: ${value === null ? never : `${name} ${formatNumber(value)}`} (${formatNumber(run.heads.tokens)} held-out ${data.unit}s)`,
        }),
      });
    }
    const layers = run.layers[quantity];
    if (layers) {
      panels.push({
        title: "By layer over training",
        draw: (host) => drawHeatMap(host, {
          ...look, label: `${name} by layer over training`, values: layers.values, rows: layers.values.map((_, n) => n),
          columns: layers.steps.map(formatNumber), rowTitle: "layer", columnTitle: "step",
          describe: (r, c, value) => `layer ${r}, step ${formatNumber(layers.steps[c])}: ${value === null ? never : `${name} ${formatNumber(value)}`}`,
        }),
      });
    }
  }
  const any = data.runs.some(hasHeads);
  drawPanels(byId("heads"), panels, [], any ? NOTHING : "No run has gates, or rotations that learn.");
}

// --- the table of runs ---------------------------------------------------------------------------------------------

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
    { label: "steps made", number: (run) => run.steps, text: (run) => (run.finished ? formatNumber(run.steps) : `${formatNumber(run.steps)}, unfinished`) },
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
  const runs = data.runs.filter((run) => matches(run) && !state.hidden.has(data.groups[run.group].series));
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
    return [row, make("tr", {}, make("td", { colspan: columns.length }, "Make it again with ", make("code", { class: "command" }, run.command)))];
  });
  byId("run-table").replaceChildren(make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
}

function isNumeric(text) {
  return text !== "" && Number.isFinite(Number(text));
}

// --- the whole page ------------------------------------------------------------------------------------------------

function drawAll() {
  const shown = data.runs.filter((run) => matches(run) && !state.hidden.has(data.groups[run.group].series)).length;
  byId("shown").textContent = shown === data.runs.length ? `${shown} runs` : `${shown} of ${data.runs.length} runs`;
  drawFinal();
  drawBeyond();
  drawProbes();
  drawCurves();
  drawHeads();
  drawSpeed();
  drawTable();
}

function start() {
  byId("title").textContent = data.title;
  for (const place of document.querySelectorAll(".units")) place.textContent = `${data.unit}s`;
  const seeds = new Set(data.runs.map((run) => run.seed)).size;
  byId("summary").textContent = `${data.runs.length} runs of ${data.groups.length} configs with ${seeds} ${seeds === 1 ? "seed" : "seeds"}`;
  if (data.notes.length) {
    byId("notes").append(make("div", { class: "notes" }, make("strong", {}, "To know"), make("ul", {}, data.notes.map((note) => make("li", {}, note)))));
  }
  byId("metric").append(...Object.entries(data.metrics).map(([name, label]) => option(name, label, name === "loss")));
  fillProbes();
  if (!data.runs.some((run) => run.finalHeldoutLoss !== null)) byId("final-kind").lastElementChild.disabled = true;
  const same = data.settings.filter((setting) => !setting.differs);
  byId("same").textContent = same.map((setting) => `${setting.label}: ${data.runs[0].settings[setting.name]}`).join(" · ");

  startTheme(byId("theme"));
  byId("filter").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    drawAll();
  });
  const redraw = {
    "final-kind": drawFinal, "beyond-kind": drawBeyond, "beyond-log": drawBeyond, probe: drawProbes, metric: drawCurves, "curve-x": drawCurves,
    "curve-log-x": drawCurves, "curve-log-y": drawCurves, "each-seed": drawCurves, late: drawCurves, smoothing: drawCurves,
    "head-run": drawHeads, "head-quantity": drawHeads, "all-settings": drawTable,
  };
  for (const [id, draw] of Object.entries(redraw)) byId(id).addEventListener("input", draw);
  drawAll();
}

start();
