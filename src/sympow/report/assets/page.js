// Shared by both pages: elements, numbers, the theme, and plots, which Plotly draws as Python describes them: {label: what it
// shows, for screen readers, height: in pixels, if not that of all plots, traces, layout: as Plotly takes them}.

const data = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

/** An HTML element. Attributes that are false or null are left out; strings among the children become text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.flat());
  return element;
}

/** Fills a <select> with options [value, label], and keeps its choice if it is still among them. */
function fill(select, options) {
  const kept = select.value;
  select.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
  if (options.some(([value]) => String(value) === kept)) select.value = kept;
}

/** Four significant digits, or all of a number's digits before the point. */
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, maximumFractionDigits: 0, roundingPriority: "morePrecision" });

function formatNumber(x) {
  return Number.isFinite(x) ? NUMBER.format(x) : "–";
}

const probe = document.body.appendChild(make("span", { hidden: "" }));

/** A plot in which every color "var(--name)" of the stylesheet is the one of the current theme, as Plotly reads no CSS. */
function colored(plot) {
  return JSON.parse(JSON.stringify(plot), (_, value) => {
    if (typeof value !== "string" || !/^var\(--[\w-]+\)$/.test(value)) return value;
    probe.style.color = value;
    return getComputedStyle(probe).color;
  });
}

byId("theme").addEventListener("input", ({ target }) => {
  document.documentElement.dataset.theme = target.value;
  redrawPlots();
});
// The system switches, or the page is printed.
for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redrawPlots);

const resized = new ResizeObserver((entries) => {
  for (const { target: host } of entries) host.stale ||= host.clientWidth !== host.drawnWidth;
  drawStale();
});
addEventListener("beforeprint", () => stalePlots().forEach(drawNow));
let drawing = false;

/** Shows a plot in `host`; a zoom is kept while its `layout.uirevision` is the same. listeners: functions by Plotly's events,
    which prevent its own reaction by returning false. */
function drawPlot(host, plot, listeners = {}) {
  if (!host.plot) {
    host.classList.add("plot");
    host.addEventListener("keydown", moveHover);
    host.addEventListener("blur", () => host.on && Plotly.Fx.unhover(host));
    resized.observe(host);
  }
  if (plot.height) host.style.height = `${plot.height}px`;
  Object.assign(host, { plot, listeners, stale: true, tabIndex: 0, role: "img", ariaLabel: plot.label });
  drawStale();
}

function redrawPlots() {
  document.querySelectorAll(".plot").forEach((host) => (host.stale = true));
  if (matchMedia("print").matches) stalePlots().forEach(drawNow);
  drawStale();
}

/** Plots that have room and are not drawn as they should be, those in view first. */
function stalePlots() {
  const away = (host) => Math.abs(host.getBoundingClientRect().top - innerHeight / 3);
  return [...document.querySelectorAll(".plot")].filter((host) => host.stale && host.clientWidth).sort((a, b) => away(a) - away(b));
}

/** Draws one plot after another, so that the page answers meanwhile. */
async function drawStale() {
  if (drawing) return;
  drawing = true;
  await null;
  for (let [host] = stalePlots(); host; [host] = stalePlots()) {
    drawNow(host);
    await new Promise((resolve) => setTimeout(resolve));
  }
  drawing = false;
}

function drawNow(host) {
  const first = !host.on;
  const { clientWidth: width, clientHeight: height } = host;
  const { traces, layout } = colored({ ...host.plot, layout: { template: data.template, width, height, ...host.plot.layout } });
  if (width < 500) layout.template.layout.xaxis.nticks = 4;
  Object.assign(host, { stale: false, drawnWidth: width });
  Plotly.react(host, traces, layout, data.config);
  if (!first) return;
  for (const name of ["click", "legendclick", "legenddoubleclick"]) host.on(`plotly_${name}`, (event) => host.listeners[name]?.(event));
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
