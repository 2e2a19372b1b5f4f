// The inspector: a text with its tokens colored by the γ and β of one head. Blocks of tokens are made as they come into view.

const BLOCK_TOKENS = 400;
const PROFILE_BINS = 160;
const layers = data.layers.map(unpackLayer);
const blocks = [];

// --- numbers -------------------------------------------------------------------------------------------------------

function unpack(text) {
  if (text === null) return null;
  const bytes = atob(text);
  const codes = new Uint16Array(bytes.length / 2);
  for (let n = 0; n < codes.length; n++) codes[n] = bytes.charCodeAt(2 * n) | (bytes.charCodeAt(2 * n + 1) << 8);
  return codes;
}

function unpackLayer(layer) {
  return { ...layer, forgetting: unpack(layer.forgetting), beta: unpack(layer.beta) };
}

/** −log γ: 0 for a head that forgets nothing. */
function decay(layer, head, token) {
  return decayOf(layers[layer].forgetting[head * data.ids.length + token]);
}

function decayOf(code) {
  if (code === 0) return 0;
  const [low, high] = [Math.log(data.slowest), Math.log(data.fastest)];
  return Math.exp(low + ((code - 1) / 65534) * (high - low));
}

function beta(layer, head, token) {
  return (layers[layer].beta[head * data.ids.length + token] / 65535) * 2;
}

function halfLife(rate) {
  return rate === 0 ? Infinity : Math.LN2 / rate;
}

function formatHalfLife(tokens) {
  return tokens === Infinity ? "never forgets" : `${formatNumber(tokens)} ${data.unit}s`;
}

/** Close to 1, as 1 − (1 − γ), whose digits are the ones that matter. */
function formatGamma(rate) {
  const lost = -Math.expm1(-rate);
  if (lost === 0) return "1";
  return lost < 1e-3 ? `1 − ${lost.toExponential(2)}` : String(Number(Math.exp(-rate).toPrecision(5)));
}

// --- the chosen head -----------------------------------------------------------------------------------------------

function chosen() {
  const layer = Number(byId("layer").value), head = Number(byId("head").value);
  return { layer, head, quantity: byId("quantity").value };
}

function available(layer) {
  return { forgetting: layers[layer].forgetting !== null, rotation: layers[layer].beta !== null };
}

/** Ends of the color scale, as log(−log γ): the 5th and the 95th percentile, of this head or of all heads. */
function decayScale(layer, head) {
  const heads = byId("same-scale").checked
    ? layers.flatMap((one, l) => (one.forgetting ? [...Array(one.heads).keys()].map((h) => [l, h]) : []))
    : [[layer, head]];
  const every = Math.max(1, Math.floor((heads.length * data.ids.length) / 20000));
  const logs = [];
  let n = 0;
  for (const [l, h] of heads) {
    for (let t = 1; t < data.ids.length; t++, n++) {
      const rate = n % every === 0 ? decay(l, h, t) : 0;
      if (rate > 0) logs.push(Math.log(rate));
    }
  }
  if (!logs.length) return [0, 1];
  logs.sort((a, b) => a - b);
  const at = (part) => logs[Math.round(part * (logs.length - 1))];
  const [low, high] = [at(0.05), at(0.95)];
  return high - low < 1e-6 ? [low - 1, high + 1] : [low, high];
}

// --- the text ------------------------------------------------------------------------------------------------------

/** Where blocks begin. A block begins a new line, so the best place is after the end of a line; in a long line it is
    after a space; in one without spaces (Chinese, say), after the last token of a character. */
function blockStarts() {
  const starts = [0];
  let line = 0, space = 0;
  data.texts.forEach((text, n) => {
    if (text.endsWith("\n")) line = n + 1;
    if (/\s$/.test(text)) space = n + 1;
    const start = starts[starts.length - 1];
    const size = n + 1 - start;
    const worthwhile = (place) => place > start + BLOCK_TOKENS / 2;
    if (size >= BLOCK_TOKENS && worthwhile(line)) starts.push(line);
    else if (size >= 2 * BLOCK_TOKENS && worthwhile(space)) starts.push(space);
    else if (size >= 4 * BLOCK_TOKENS && text !== "") starts.push(n + 1);
  });
  return starts.filter((start) => start < data.texts.length);
}

function makeBlocks() {
  const host = byId("text");
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const block = blocks[entry.target.dataset.block];
      block.near = entry.isIntersecting;
      if (block.near) paint(block);
    }
  }, { rootMargin: "600px" });
  const starts = blockStarts();
  starts.forEach((start, n) => {
    const element = make("div", { class: "block", "data-block": n });
    const stop = starts[n + 1] ?? data.texts.length;
    // The expected height, so that the page does not jump when tokens are added.
    element.style.minHeight = `${Math.max(1, Math.round((stop - start) / 25))}em`;
    blocks.push({ element, start, stop, tokens: null, painted: null, near: false });
    host.append(element);
    observer.observe(element);
  });
}

function makeToken(n) {
  const text = data.texts[n];
  const attributes = { class: "token", "data-token": n };
  if (n === 0) return make("span", { ...attributes, class: "token boundary" }, text);
  if (text === "") return make("span", { ...attributes, class: "token part" });
  if (!text.includes("\n")) return make("span", attributes, text);
  const parts = text.split("\n").flatMap((part, k) => (k ? [make("span", { class: "return", "aria-hidden": "true" }, "⏎"), "\n", part] : [part]));
  return make("span", attributes, parts);
}

function paint(block) {
  if (!block.tokens) {
    block.tokens = [];
    for (let n = block.start; n < block.stop; n++) block.tokens.push(makeToken(n));
    block.element.replaceChildren(...block.tokens);
    block.element.style.minHeight = "";
  }
  if (block.painted === painting.version) return;
  block.painted = painting.version;
  const { layer, head, low, high, shows } = painting;
  block.tokens.forEach((element, k) => {
    const n = block.start + k;
    if (shows.forgetting) {
      const rate = decay(layer, head, n);
      const part = rate === 0 ? 0 : (Math.log(rate) - low) / (high - low);
      element.style.setProperty("--forgot", Math.min(1, Math.max(0, part)).toFixed(3));
    } else element.style.setProperty("--forgot", 0);
    if (shows.rotation) {
      const excess = beta(layer, head, n) - 1;
      element.style.setProperty("--rotated", Math.min(1, Math.abs(excess)).toFixed(3));
      element.classList.toggle("more", excess > 0);
      element.classList.toggle("less", excess <= 0);
    } else element.style.setProperty("--rotated", 0);
  });
}

const painting = { version: 0 };

function repaint() {
  const { layer, head, quantity } = chosen();
  const has = available(layer);
  const shows = {
    forgetting: has.forgetting && quantity !== "rotation",
    rotation: has.rotation && quantity !== "forgetting",
  };
  const [low, high] = has.forgetting ? decayScale(layer, head) : [0, 1];
  Object.assign(painting, { version: painting.version + 1, layer, head, low, high, shows });
  byId("text").classList.toggle("rotation", quantity === "rotation");
  byId("text").classList.toggle("both", quantity === "both");
  for (const block of blocks) if (block.near) paint(block);
  drawScale(low, high, shows, quantity);
}

function ramp(color, reversed) {
  return make("span", {
    class: "ramp", "aria-hidden": "true",
    style: `background: linear-gradient(to ${reversed ? "left" : "right"}, transparent, color-mix(in srgb, var(${color}) 75%, transparent))`,
  });
}

function drawScale(low, high, shows, quantity) {
  const parts = [];
  const words = (text) => make("span", { style: "white-space: nowrap" }, text);
  if (shows.forgetting) {
    parts.push(make("span", {}, words(`half-life ${formatHalfLife(halfLife(Math.exp(low)))} or more`), ramp("--forget"), words(`${formatHalfLife(halfLife(Math.exp(high)))} or less`)));
  }
  if (shows.rotation) {
    const how = quantity === "both" ? "underline: " : "";
    parts.push(make("span", {}, words(`${how}no rotation, β = 0`), ramp("--rotate-less", true), words("fixed rate, 1"), ramp("--rotate-more"), words("twice the rate, 2")));
  }
  byId("scale").replaceChildren(...parts);
}

function describe(n) {
  const { layer, head } = chosen();
  const has = available(layer);
  const text = n === 0 ? data.texts[0] : data.texts[n] === "" ? "part of the next character" : JSON.stringify(data.texts[n]);
  const rows = [[data.unit, `${formatNumber(n)} of ${formatNumber(data.ids.length - 1)}, id ${data.ids[n]}`]];
  if (has.forgetting) {
    const rate = decay(layer, head, n);
    rows.push(["γ", formatGamma(rate)], ["half-life", formatHalfLife(halfLife(rate))]);
  }
  if (has.rotation) rows.push(["β", beta(layer, head, n).toFixed(4)]);
  return [
    make("strong", {}, text),
    make("table", {}, rows.map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", { class: "number" }, value)))),
  ];
}

// --- the overview --------------------------------------------------------------------------------------------------

/** Which of the two the overview is about: what the colors show, forgetting first. */
function overviewOf(layer) {
  const has = available(layer);
  return byId("quantity").value === "rotation" && has.rotation ? "rotation" : has.forgetting ? "forgetting" : "rotation";
}

const tables = {};

/** Per layer and head: the median half-life, or the mean β. The boundary before the text does not count. */
function tableOf(kind) {
  const codes = (packed, h) => packed.slice(h * data.ids.length + 1, (h + 1) * data.ids.length);
  const medianHalfLife = (packed, h) => {
    // A larger code is a faster decay, so that the median of codes is that of half-lives.
    const sorted = codes(packed, h).sort();
    const life = halfLife(decayOf(sorted[sorted.length >> 1]));
    return life === Infinity ? null : life;
  };
  const meanBeta = (packed, h) => (codes(packed, h).reduce((sum, code) => sum + code, 0) / (data.ids.length - 1) / 65535) * 2;
  const [field, number] = kind === "forgetting" ? ["forgetting", medianHalfLife] : ["beta", meanBeta];
  tables[kind] ??= layers.map((layer) => [...Array(layer.heads).keys()].map((h) => (layer[field] ? number(layer[field], h) : null)));
  return tables[kind];
}

function drawOverview() {
  const { layer, head } = chosen();
  const kind = overviewOf(layer);
  const name = kind === "forgetting" ? `median half-life (${data.unit}s)` : "mean β";
  byId("map-title").textContent = `All heads: ${name}. Click to choose.`;
  drawHeatMap(byId("map"), {
    label: `${name} by layer and head`, rowTitle: "layer", columnTitle: "head", values: tableOf(kind),
    columns: [...Array(Math.max(...layers.map((one) => one.heads))).keys()],
    ...(kind === "forgetting" ? { log: true } : { aroundOne: true, domain: [0, 2] }),
    describe: (r, c, value) => `layer ${r}, head ${c}: ${value === null ? (kind === "forgetting" ? "never forgets" : "no β") : `${name} ${formatNumber(value)}`}`,
    picked: [layer, head],
    pick: choose,
  });
  drawProfile(kind);
}

/** The chosen head over the whole text, averaged over ranges of tokens; a click scrolls there. */
function drawProfile(kind) {
  const { layer, head } = chosen();
  const count = data.ids.length - 1;
  const size = Math.max(1, Math.ceil(count / PROFILE_BINS));
  const bins = [];
  for (let start = 1; start <= count; start += size) {
    const stop = Math.min(count + 1, start + size);
    let sum = 0;
    for (let t = start; t < stop; t++) sum += kind === "forgetting" ? decay(layer, head, t) : beta(layer, head, t);
    const mean = sum / (stop - start);
    bins.push({ start, last: stop - 1, y: kind === "forgetting" ? halfLife(mean) : mean });
  }
  const shown = bins.filter((bin) => Number.isFinite(bin.y));
  const each = size === 1 ? `each ${data.unit}` : `every ${size} ${data.unit}s`;
  const [decays, turns] = size === 1 ? ["half-life", "β"] : ["half-life of the mean decay", "mean β"];
  const label = kind === "forgetting" ? `${decays} of ${each}; up is forgetting more` : `${turns} of ${each}`;
  byId("profile-note").hidden = kind !== "forgetting" || size === 1;
  byId("profile-title").textContent = `Layer ${layer}, head ${head}: ${label}. Click to go there.`;
  const range = ({ start, last }) => (start === last ? formatNumber(start) : `${formatNumber(start)} to ${formatNumber(last)}`);
  const number = ({ y }) => (kind === "forgetting" ? `${decays} ${formatHalfLife(y)}` : `${turns} ${y.toFixed(4)}`);
  drawPlot(byId("profile"), {
    label,
    traces: [{
      type: "scatter", mode: "lines", x: shown.map((bin) => bin.start), y: shown.map((bin) => bin.y), visible: true,
      line: { shape: "hv", width: 2, color: themeColor(kind === "forgetting" ? "forget" : "rotate-more") },
      customdata: shown.map((bin) => `${data.unit} ${range(bin)}: ${number(bin)}`), hovertemplate: "%{customdata}<extra></extra>",
    }],
    layout: {
      hovermode: "x", showlegend: false, uirevision: `${kind} ${layer} ${head}`,
      xaxis: { title: { text: data.unit }, showspikes: true, spikemode: "across", spikethickness: 1 },
      yaxis: kind === "forgetting" ? { type: "log", autorange: "reversed", nticks: 5 } : { range: [0, 2], dtick: 1 },
    },
    on: { click: (event) => goTo(event.points[0].x) },
  });
}

function goTo(token) {
  const block = blocks.findLast((candidate) => candidate.start <= token);
  paint(block);
  document.querySelectorAll(".token.here").forEach((element) => element.classList.remove("here"));
  const element = block.tokens[token - block.start];
  element.classList.add("here");
  element.scrollIntoView({ block: "center" });
}

// --- the whole page ------------------------------------------------------------------------------------------------

function fillHeads() {
  const { layer } = chosen();
  const head = Math.min(Number(byId("head").value) || 0, layers[layer].heads - 1);
  byId("head").replaceChildren(...[...Array(layers[layer].heads).keys()].map((n) => option(n, n, n === head)));
}

function choose(layer, head) {
  byId("layer").value = layer;
  fillHeads();
  byId("head").value = head;
  redraw();
}

function redraw() {
  repaint();
  drawOverview();
}

function start() {
  byId("title").textContent = data.title;
  for (const place of document.querySelectorAll(".units")) place.textContent = `${data.unit}s`;
  const tokens = formatNumber(data.ids.length - 1);
  byId("summary").textContent = `${tokens} ${data.unit}s, ${layers.length} layers of ${Math.max(...layers.map((one) => one.heads))} heads. Point at a ${data.unit} for its numbers.`;
  const notes = [];
  if (data.leftOut) notes.push(`The text continues for ${formatNumber(data.leftOut)} ${data.unit}s that are not shown; sympow inspect --tokens shows more.`);
  if (layers.some((layer) => layer.pairs)) notes.push("Gates or rotations of this model act on pairs of a head's dimensions; the page shows the mean over pairs of log γ and of β.");
  if (data.hiddenRotation) notes.push(`The rotation of this model (rotary="${data.hiddenRotation}") turns half of the pairs by angles of their own and has no scale β to show.`);
  showNotes(notes);

  byId("layer").append(...layers.map((layer, n) => option(n, n, false)));
  const forgets = layers.some((layer) => layer.forgetting), rotates = layers.some((layer) => layer.beta);
  for (const [value, there] of [["both", forgets && rotates], ["forgetting", forgets], ["rotation", rotates]]) {
    byId("quantity").querySelector(`[value=${value}]`).disabled = !there;
  }
  byId("quantity").value = forgets && rotates ? "both" : forgets ? "forgetting" : "rotation";
  fillHeads();
  startTheme(drawOverview);
  byId("layer").addEventListener("input", () => (fillHeads(), redraw()));
  for (const id of ["head", "quantity", "same-scale"]) byId(id).addEventListener("input", redraw);

  const text = byId("text");
  text.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".token");
    if (token) tooltip.show(event, ...describe(Number(token.dataset.token)));
    else tooltip.hide();
  });
  text.addEventListener("pointerleave", () => tooltip.hide());
  // On paper all blocks are in view.
  addEventListener("beforeprint", () => blocks.forEach(paint));
  makeBlocks();
  redraw();
}

start();
