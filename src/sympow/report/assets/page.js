// Shared by both pages: elements, numbers, the theme, and line plots and heat maps drawn by Plotly.

const data = JSON.parse(document.getElementById("data").textContent);

// --- elements ------------------------------------------------------------------------------------------------------

function byId(id) {
  return document.getElementById(id);
}

/** An HTML element. Attributes that start with "on" are event listeners; those that are false or null are left out. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

function option(value, label, selected) {
  return make("option", { value, selected: selected ? "" : false }, label);
}

function showNotes(notes) {
  if (notes.length) byId("notes").append(make("div", { class: "notes" }, make("ul", {}, notes.map((note) => make("li", {}, note)))));
}

// --- numbers -------------------------------------------------------------------------------------------------------

/** So many significant digits, with separators from 1,000 on and an exponent for very small and very large numbers. */
function formatNumber(x, digits = 4) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(2).replace("e+", "e");
  if (size >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(digits)));
}

// --- theme ---------------------------------------------------------------------------------------------------------

const probe = document.body.appendChild(make("span", { hidden: "" }));

/** A color of the stylesheet under the current theme, in a form that Plotly accepts. */
function themeColor(name, opacity = 1) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color.replace("rgb(", "rgba(").replace(")", `, ${opacity})`);
}

/** Calls `redraw` whenever the colors change: the reader chooses a theme, the system switches, or the page is printed. */
function startTheme(redraw) {
  byId("theme").addEventListener("change", ({ target }) => {
    if (target.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = target.value;
    redraw();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redraw);
}

/** Defaults of every plot of this width, as a Plotly template. */
function template(width) {
  const axis = {
    automargin: true, gridcolor: themeColor("grid"), linecolor: themeColor("line"), showline: true, zeroline: false,
    tickfont: { color: themeColor("muted") }, title: { standoff: 8, font: { color: themeColor("muted"), size: 12 } },
    separatethousands: true, exponentformat: "B", minexponent: 6,
  };
  return {
    layout: {
      margin: { l: 4, r: 28, t: 8, b: 4 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: themeColor("ink") },
      hoverlabel: { bgcolor: themeColor("card"), bordercolor: themeColor("line"), font: { color: themeColor("ink") }, namelength: -1 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", groupclick: "togglegroup" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: themeColor("muted"), activecolor: themeColor("accent"), orientation: "v" },
      xaxis: { ...axis, nticks: width < 500 ? 4 : 0 }, yaxis: axis,
    },
  };
}

// --- plots ---------------------------------------------------------------------------------------------------------

// Of Plotly's buttons, those that stay within the page: some versions also offer to upload the plot.
const CONFIG = { displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
// Plots near the window are drawn at once, the others one by one while the browser is idle, and all of them for printing.
const visible = new IntersectionObserver((entries) => {
  for (const { target: host, isIntersecting } of entries) {
    host.near = isIntersecting;
    drawSoonOrLater(host);
  }
}, { rootMargin: "400px" });
const resized = new ResizeObserver((entries) => {
  for (const { target: host } of entries) {
    host.stale ||= host.clientWidth !== host.drawnWidth;
    drawSoonOrLater(host);
  }
});
addEventListener("beforeprint", () => stalePlots().forEach(drawNow));
// Not every browser has requestIdleCallback. A busy machine draws them as well, a little later.
const whenIdle = (draw) => (window.requestIdleCallback ? requestIdleCallback(draw, { timeout: 200 }) : setTimeout(draw, 50));
let idle = false;

/** Plots that have room and are not drawn as they should be. */
function stalePlots() {
  return [...document.querySelectorAll(".plot")].filter((host) => host.stale && host.clientWidth);
}

function drawSoonOrLater(host) {
  if (!host.stale || !host.clientWidth) return;
  if (host.near || matchMedia("print").matches) drawNow(host);
  else drawNext();
}

function drawNext() {
  if (idle) return;
  idle = true;
  whenIdle(() => {
    idle = false;
    const [host, another] = stalePlots();
    if (host) drawNow(host);
    if (another) drawNext();
  });
}

/** A logarithmic axis for these contexts or positions with ticks at powers of two, about six at most. */
function powersOfTwo(text, xs) {
  const octaves = Math.log2(Math.max(...xs) / Math.min(...xs));
  const stride = Math.max(1, Math.ceil(octaves / 5));
  return { title: { text }, type: "log", tick0: 0, dtick: stride * Math.log10(2), tickformat: ",.0f" };
}

/** Text that Plotly shows as it is: in its labels, a few HTML tags have a meaning. */
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/**
 * Shows a plot in `host`. A zoom is kept while `layout.uirevision` stays the same.
 *
 * plot: {
 *   label: what it shows, for screen readers,
 *   traces, layout: as Plotly takes them,
 *   on: { event name: listener }, in which a listener that returns false prevents Plotly's own reaction,
 * }
 */
function drawPlot(host, plot) {
  const first = !host.plot;
  Object.assign(host, { plot, stale: true, tabIndex: 0, role: "img", ariaLabel: plot.label });
  if (first) {
    host.classList.add("plot");
    host.addEventListener("keydown", moveHover);
    host.addEventListener("blur", () => host.on && Plotly.Fx.unhover(host));
    visible.observe(host);
    resized.observe(host);
  }
  drawSoonOrLater(host);
}

function drawNow(host) {
  const first = !host.on;
  const { traces, layout } = host.plot;
  Object.assign(host, { stale: false, drawnWidth: host.clientWidth });
  Plotly.react(host, traces, { template: template(host.clientWidth), width: host.clientWidth, height: host.clientHeight, ...layout }, CONFIG);
  if (!first) return;
  for (const name of ["click", "legendclick", "legenddoubleclick"]) host.on(`plotly_${name}`, (event) => host.plot.on?.[name]?.(event));
}

/** Arrow keys move the hover label of a line plot from point to point. */
function moveHover(event) {
  const host = event.currentTarget;
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const lines = host.plot.traces.filter((trace) => trace.customdata && trace.visible === true);
  const xs = [...new Set(lines.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  if (!step || !xs.length || !host.on) return;
  event.preventDefault();
  host.hovered = Math.min(xs.length - 1, Math.max(0, (host.hovered ?? -1) + step));
  Plotly.Fx.hover(host, { xval: xs[host.hovered] });
}

// A scale that diverges from 1, purple to green, whose lightness alone tells how far.
const AROUND_ONE = ["#40004b", "#762a83", "#9970ab", "#c2a5cf", "#f7f7f7", "#a6dba0", "#5aae61", "#1b7837", "#00441b"];

/**
 * spec: {
 *   label, rowTitle, columnTitle, columns: labels, values: [row][column] (null: no number),
 *   log, aroundOne, domain: [low, high] (by default that of the values),
 *   describe(row, column, value) for the hover label,
 *   pick(row, column) and picked: [row, column], if cells can be chosen,
 * }
 */
function drawHeatMap(host, spec) {
  const { values, log, picked } = spec;
  const known = values.flat().filter((x) => x !== null && (!log || x > 0));
  const pass = (x) => (x === null || (log && x <= 0) ? null : log ? Math.log10(x) : x);
  let [low, high] = (spec.domain ?? (known.length ? [Math.min(...known), Math.max(...known)] : [1, 2])).map(pass);
  if (low === high) [low, high] = [low - 0.05, high + 0.05];
  const ticks = [low, (low + high) / 2, high];
  host.style.height = `${Math.max(160, 70 + values.length * Math.min(34, Math.max(18, 340 / values.length)))}px`;
  const tip = (value, r, c) => plain(spec.describe(r, c, value));
  drawPlot(host, {
    label: spec.label,
    traces: [{
      type: "heatmap", z: values.map((row) => row.map(pass)), x: spec.columns, y: values.map((_, r) => r), zmin: low, zmax: high,
      text: values.map((row) => row.map((x) => formatNumber(x, 3))), texttemplate: spec.columns.length > 16 ? "" : "%{text}",
      hovertext: values.map((row, r) => row.map((x, c) => tip(x, r, c))), hoverinfo: "text", xgap: 1, ygap: 1,
      colorscale: spec.aroundOne ? AROUND_ONE.map((stop, n) => [n / (AROUND_ONE.length - 1), stop]) : "Cividis",
      colorbar: {
        thickness: 10, outlinewidth: 0, tickvals: ticks, ticktext: ticks.map((x) => formatNumber(log ? 10 ** x : x, 3)),
      },
    }],
    layout: {
      xaxis: { type: "category", title: { text: spec.columnTitle }, showgrid: false, fixedrange: true },
      yaxis: { type: "category", title: { text: spec.rowTitle }, showgrid: false, fixedrange: true, autorange: "reversed" },
      plot_bgcolor: themeColor("grid"),
      shapes: picked ? [{
        type: "rect", x0: picked[1] - 0.5, x1: picked[1] + 0.5, y0: picked[0] - 0.5, y1: picked[0] + 0.5,
        line: { color: themeColor("mark"), width: 3 },
      }] : [],
    },
    on: { click: (event) => spec.pick?.(...event.points[0].pointNumber) },
  });
}

// --- the hover label of text -----------------------------------------------------------------------------------------

const tooltip = {
  show(event, ...content) {
    const box = byId("tooltip");
    box.replaceChildren(...content);
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
    const top = event.clientY + 16 + height > innerHeight ? event.clientY - 16 - height : event.clientY + 16;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    byId("tooltip").hidden = true;
  },
};
