// Making elements, and what both pages have: data, theme, tooltip, legend.

function pageData() {
  return JSON.parse(document.getElementById("data").textContent);
}

function byId(id) {
  return document.getElementById(id);
}

/** An HTML element; attributes that begin with "on" are listeners, false ones are left out. */
function make(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function makeSvg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function option(value, label, selected) {
  return make("option", { value, selected: selected ? "" : false }, label);
}

/** Follows the system until the reader chooses. */
function startTheme(select) {
  select.addEventListener("change", () => {
    if (select.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
  });
}

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

const MARKERS = {
  circle: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  square: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  diamond: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0z`,
  triangle: (r) => `M0,${-1.2 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
  cross: (r) => `M${-r},${-r}L${r},${r}M${-r},${r}L${r},${-r}`,
  star: (r) => `M0,${-1.5 * r}L${0.45 * r},${-0.5 * r}L${1.5 * r},0L${0.45 * r},${0.5 * r}L0,${1.5 * r}L${-0.45 * r},${0.5 * r}L${-1.5 * r},0L${-0.45 * r},${-0.5 * r}z`,
};

function marker(style, x, y, size) {
  return makeSvg("path", {
    d: MARKERS[style.marker](size),
    transform: `translate(${x},${y})`,
    style: `fill: ${style.marker === "cross" ? "none" : style.colour}; stroke: ${style.colour}; stroke-width: 1.5`,
  });
}

/** A short piece of a series' line. */
function swatch(style) {
  const line = makeSvg("line", {
    x1: 1, x2: 33, y1: 7, y2: 7,
    style: `stroke: ${style.colour}; stroke-width: 2.5; stroke-dasharray: ${style.dash.join(" ") || "none"}`,
  });
  return makeSvg("svg", { viewBox: "0 0 34 14", "aria-hidden": "true" }, line, marker(style, 17, 7, 3.5));
}

/** Buttons that show and hide series. A double click shows one alone. */
function drawLegend(host, series, hidden, onChange) {
  const toggle = (place) => () => {
    if (!hidden.delete(place)) hidden.add(place);
    onChange();
  };
  const alone = (place) => () => {
    for (const other of series) if (other.place !== place) hidden.add(other.place);
    hidden.delete(place);
    onChange();
  };
  const buttons = series.map((style) =>
    make(
      "button",
      {
        type: "button",
        "aria-pressed": String(!hidden.has(style.place)),
        "data-series": style.label,
        title: "Click to show or hide, double-click to show alone",
        onclick: toggle(style.place),
        ondblclick: alone(style.place),
      },
      swatch(style),
      style.label,
    ),
  );
  if (series.some((style) => hidden.has(style.place))) {
    buttons.push(make("button", { type: "button", class: "all", onclick: () => (hidden.clear(), onChange()) }, "Show all"));
  }
  host.replaceChildren(...buttons);
}
