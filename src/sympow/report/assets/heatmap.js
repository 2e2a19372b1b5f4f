// A heat map in SVG with its colour scale. Colours can be told apart by lightness alone.

// Points of cividis and of purple to green, from low to high.
const RAMPS = {
  growing: ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
  aroundOne: ["#40004b", "#762a83", "#9970ab", "#c2a5cf", "#f7f7f7", "#a6dba0", "#5aae61", "#1b7837", "#00441b"],
};

function rampColour(ramp, part) {
  const stops = RAMPS[ramp];
  const at = Math.min(1, Math.max(0, part)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  const channels = [1, 3, 5].map((n) => {
    const [a, b] = [stops[low], stops[low + 1]].map((stop) => parseInt(stop.slice(n, n + 2), 16));
    return Math.round(a + (b - a) * (at - low));
  });
  return { css: `rgb(${channels.join(",")})`, light: 0.3 * channels[0] + 0.59 * channels[1] + 0.11 * channels[2] > 130 };
}

/**
 * Draws into `host`, and again whenever its width changes.
 *
 * spec: {
 *   label, rowTitle, columnTitle, rows: labels, columns: labels, values: [row][column] (null: none),
 *   log, ramp: "growing" or "aroundOne", domain: [low, high] (by default that of the values),
 *   describe(row, column, value) for the tooltip,
 *   pick(row, column) and picked: [row, column] if cells can be chosen,
 * }
 */
function drawHeatMap(host, spec) {
  host.classList.add("heat");
  host.heatSpec = spec;
  if (!host.observer) {
    host.observer = new ResizeObserver(() => {
      if (Math.round(host.clientWidth) !== host.drawnWidth) renderHeatMap(host);
    });
    host.observer.observe(host);
  }
  renderHeatMap(host);
}

function heatDomain(values, log) {
  const known = values.flat().filter((x) => x !== null && (!log || x > 0));
  if (!known.length) return [1, 2];
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low === high ? [log ? low / 1.1 : low - 0.05, log ? high * 1.1 : high + 0.05] : [low, high];
}

function renderHeatMap(host) {
  const spec = host.heatSpec;
  const width = Math.max(200, Math.round(host.clientWidth));
  host.drawnWidth = Math.round(host.clientWidth);
  const left = 58, right = 4, top = 4, below = 36, scaleHeight = 44;
  const columnWidth = (width - left - right) / spec.columns.length;
  const rowHeight = Math.min(34, Math.max(18, 340 / spec.rows.length));
  const bottom = top + rowHeight * spec.rows.length;
  const height = bottom + below + scaleHeight;
  const ramp = spec.ramp ?? "growing";
  const [low, high] = spec.domain ?? heatDomain(spec.values, spec.log);
  const pass = spec.log ? Math.log : (v) => v;
  const part = (value) => (pass(value) - pass(low)) / (pass(high) - pass(low));
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.label });

  spec.values.forEach((row, r) => row.forEach((value, c) => {
    const known = value !== null && (!spec.log || value > 0);
    const colour = known ? rampColour(ramp, part(value)) : null;
    const text = value === null ? "–" : formatTick(value);
    svg.append(makeSvg("rect", {
      class: `cell${spec.pick ? " pickable" : ""}`,
      "data-row": r, "data-column": c, "data-value": value,
      x: left + c * columnWidth, y: top + r * rowHeight, width: columnWidth, height: rowHeight,
      style: `fill: ${colour ? colour.css : "var(--grid)"}`,
      onpointermove: (event) => tooltip.show(event, spec.describe(r, c, value)),
      onpointerleave: () => tooltip.hide(),
      onclick: () => spec.pick?.(r, c),
    }));
    if (columnWidth >= 7 * text.length + 4 && rowHeight >= 16) {
      svg.append(makeSvg("text", {
        x: left + (c + 0.5) * columnWidth, y: top + (r + 0.5) * rowHeight + 4, "text-anchor": "middle", "pointer-events": "none",
        style: colour ? `fill: ${colour.light ? "#111" : "#fff"}` : "",
      }, text));
    }
  }));
  if (spec.picked) {
    const [r, c] = spec.picked;
    svg.append(makeSvg("rect", {
      class: "picked", x: left + c * columnWidth, y: top + r * rowHeight, width: columnWidth, height: rowHeight,
    }));
  }
  const everyRow = Math.max(1, Math.ceil(14 / rowHeight));
  spec.rows.forEach((label, r) => {
    if (r % everyRow === 0) svg.append(makeSvg("text", { class: "tick", x: left - 6, y: top + (r + 0.5) * rowHeight + 4, "text-anchor": "end" }, label));
  });
  const longest = Math.max(...spec.columns.map((label) => String(label).length));
  const everyColumn = Math.max(1, Math.ceil((7.5 * longest + 8) / columnWidth));
  spec.columns.forEach((label, c) => {
    if (c % everyColumn === 0) {
      const end = c === spec.columns.length - 1 && c > 0 && everyColumn > 1;
      svg.append(makeSvg("text", {
        class: "tick", x: end ? width - right : left + (c + 0.5) * columnWidth, y: bottom + 15, "text-anchor": end ? "end" : "middle",
      }, label));
    }
  });
  svg.append(
    makeSvg("text", { class: "axis-label", x: left + (width - left - right) / 2, y: bottom + 31, "text-anchor": "middle" }, spec.columnTitle),
    makeSvg("text", { class: "axis-label", transform: `translate(13,${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.rowTitle),
  );

  // The colour scale, in as many steps as one can see.
  const scaleTop = bottom + below + 8, scaleWidth = Math.min(260, width - left - right), steps = 60;
  for (let n = 0; n < steps; n++) {
    svg.append(makeSvg("rect", {
      x: left + (n * scaleWidth) / steps, y: scaleTop, width: scaleWidth / steps + 0.5, height: 10,
      style: `fill: ${rampColour(ramp, n / (steps - 1)).css}`,
    }));
  }
  const middle = spec.log ? Math.sqrt(low * high) : (low + high) / 2;
  [[low, 0, "start"], [middle, 0.5, "middle"], [high, 1, "end"]].forEach(([value, at, anchor]) => {
    svg.append(makeSvg("text", { class: "tick", x: left + at * scaleWidth, y: scaleTop + 24, "text-anchor": anchor }, formatTick(value)));
  });
  host.replaceChildren(svg);
}
