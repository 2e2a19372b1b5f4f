// A text with its tokens coloured by what one head did there. Blocks of tokens are made when they come into view.

const data = pageData();
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

/** −log γ: 0 for a head that keeps all. */
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

/** Near 1 the digits after the nines are what matters. */
function formatGamma(rate) {
  const lost = -Math.expm1(-rate);
  if (lost === 0) return "1";
  return lost < 1e-3 ? `1 − ${lost.toExponential(2)}` : String(Number(Math.exp(-rate).toPrecision(5)));
}

// --- what was chosen -----------------------------------------------------------------------------------------------

function chosen() {
  const layer = Number(byId("layer").value), head = Number(byId("head").value);
  return { layer, head, quantity: byId("quantity").value };
}

function available(layer) {
  return { forgetting: layers[layer].forgetting !== null, turning: layers[layer].beta !== null };
}

/** Decays that show as none and as all: the fifth and 95th percentile, of this head or of all. */
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
    // Room for text to come, so that the page does not jump.
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
    if (shows.turning) {
      const turn = beta(layer, head, n) - 1;
      element.style.setProperty("--turned", Math.min(1, Math.abs(turn)).toFixed(3));
      element.classList.toggle("more", turn > 0);
      element.classList.toggle("less", turn <= 0);
    } else element.style.setProperty("--turned", 0);
  });
}

const painting = { version: 0 };

function repaint() {
  const { layer, head, quantity } = chosen();
  const has = available(layer);
  const shows = {
    forgetting: has.forgetting && quantity !== "turning",
    turning: has.turning && quantity !== "forgetting",
  };
  const [low, high] = has.forgetting ? decayScale(layer, head) : [0, 1];
  Object.assign(painting, { version: painting.version + 1, layer, head, low, high, shows });
  byId("text").classList.toggle("turning", quantity === "turning");
  byId("text").classList.toggle("both", quantity === "both");
  for (const block of blocks) if (block.near) paint(block);
  drawScale(low, high, shows, quantity);
}

function ramp(colour, reversed) {
  return make("span", {
    class: "ramp", "aria-hidden": "true",
    style: `background: linear-gradient(to ${reversed ? "left" : "right"}, transparent, color-mix(in srgb, var(${colour}) 75%, transparent))`,
  });
}

function drawScale(low, high, shows, quantity) {
  const parts = [];
  const words = (text) => make("span", { style: "white-space: nowrap" }, text);
  if (shows.forgetting) {
    parts.push(make("span", {}, words(`half-life ${formatHalfLife(halfLife(Math.exp(low)))} or more`), ramp("--forget"), words(`${formatHalfLife(halfLife(Math.exp(high)))} or less`)));
  }
  if (shows.turning) {
    const how = quantity === "both" ? "underline: " : "";
    parts.push(make("span", {}, words(`${how}stands still, β = 0`), ramp("--turn-less", true), words("fixed rate, 1"), ramp("--turn-more"), words("twice as fast, 2")));
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
  if (has.turning) rows.push(["β", beta(layer, head, n).toFixed(4)]);
  return [
    make("strong", {}, text),
    make("table", {}, rows.map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", { class: "number" }, value)))),
  ];
}

// --- the overview --------------------------------------------------------------------------------------------------

/** Which of the two the overview is about: what the colours show, forgetting first. */
function overviewOf(layer) {
  const has = available(layer);
  return byId("quantity").value === "turning" && has.turning ? "turning" : has.forgetting ? "forgetting" : "turning";
}

const medians = { forgetting: null, turning: null };

/** Per layer and head: the median half-life, or the mean β. */
function tableOf(kind) {
  if (medians[kind]) return medians[kind];
  // Codes are in the order of what they stand for, and equal steps of β: numbers are made of few of them. The boundary
  // before the text does not count.
  const ofHead = (codes, h) => codes.slice(h * data.ids.length + 1, (h + 1) * data.ids.length);
  medians[kind] = layers.map((layer) => [...Array(layer.heads).keys()].map((h) => {
    if (kind === "forgetting") {
      if (!layer.forgetting) return null;
      const sorted = ofHead(layer.forgetting, h).sort();
      const life = halfLife(decayOf(sorted[sorted.length >> 1]));
      return life === Infinity ? null : life;
    }
    if (!layer.beta) return null;
    const codes = ofHead(layer.beta, h);
    return ((codes.reduce((sum, code) => sum + code, 0) / codes.length) / 65535) * 2;
  }));
  return medians[kind];
}

function drawOverview() {
  const { layer, head } = chosen();
  const kind = overviewOf(layer);
  const values = tableOf(kind);
  const name = kind === "forgetting" ? `median half-life (${data.unit}s)` : "mean β";
  byId("map-title").textContent = `All heads: ${name}. Click to choose.`;
  const columns = [...Array(Math.max(...layers.map((one) => one.heads))).keys()];
  drawHeatMap(byId("map"), {
    label: `${name} by layer and head`, rows: layers.map((_, n) => n), columns, values, rowTitle: "layer", columnTitle: "head",
    ...(kind === "forgetting" ? { log: true } : { ramp: "aroundOne", domain: [0, 2] }),
    describe: (r, c, value) => `layer ${r}, head ${c}: ${value === null ? (kind === "forgetting" ? "never forgets" : "no β") : `${name} ${formatNumber(value)}`}`,
    picked: [layer, head],
    pick: (r, c) => choose(r, c),
  });
  drawProfile(kind);
}

/** The chosen head over the whole text, in ranges; a click goes there. */
function drawProfile(kind) {
  const { layer, head } = chosen();
  const host = byId("profile");
  const width = Math.max(260, host.clientWidth), height = 150, left = 56, bottom = 22, top = 8;
  const count = data.ids.length - 1;
  const size = Math.max(1, Math.ceil(count / PROFILE_BINS));
  const points = [];
  for (let start = 1; start <= count; start += size) {
    const tokens = [...Array(Math.min(size, count + 1 - start)).keys()].map((k) => start + k);
    const mean = (f) => tokens.reduce((sum, t) => sum + f(t), 0) / tokens.length;
    points.push({ start, y: kind === "forgetting" ? mean((t) => decay(layer, head, t)) : mean((t) => beta(layer, head, t)) });
  }
  const shown = kind === "forgetting" ? points.filter((point) => point.y > 0) : points;
  const value = kind === "forgetting" ? (point) => -Math.log(halfLife(point.y)) : (point) => point.y;
  const ys = shown.map(value);
  let [low, high] = kind === "forgetting" ? [Math.min(...ys), Math.max(...ys)] : [0, 2];
  if (!(high > low)) [low, high] = [low - 1, low + 1];
  const x = (token) => left + ((token - 1) / Math.max(1, count)) * (width - left - 6);
  const y = (v) => height - bottom - ((v - low) / (high - low)) * (height - bottom - top);
  const label = kind === "forgetting" ? `half-life over the text (${data.unit}s); up is forgetting more` : "β over the text";
  byId("profile-title").textContent = `Layer ${layer}, head ${head}: ${label}. Click to go there.`;
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, style: "cursor: pointer" });
  const ticks = kind === "forgetting" ? [low, (low + high) / 2, high] : [0, 1, 2];
  for (const tick of ticks) {
    const text = kind === "forgetting" ? formatNumber(Number(Math.exp(-tick).toPrecision(2))) : String(tick);
    svg.append(
      makeSvg("line", { class: "gridline", x1: left, x2: width - 6, y1: y(tick), y2: y(tick) }),
      makeSvg("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, text),
    );
  }
  const path = shown.map((point) => {
    const end = Math.min(count + 1, point.start + size);
    return `${x(point.start).toFixed(1)},${y(value(point)).toFixed(1)}H${x(end).toFixed(1)}`;
  });
  svg.append(
    makeSvg("path", { class: "line", d: path.length ? `M${path.join("L")}` : "", style: `stroke: var(${kind === "forgetting" ? "--forget" : "--turn-more"})` }),
    makeSvg("text", { class: "axis-label", x: left, y: height - 5 }, `${data.unit} 1`),
    makeSvg("text", { class: "axis-label", x: width - 6, y: height - 5, "text-anchor": "end" }, formatNumber(count)),
  );
  const tokenAt = (event) => {
    const box = svg.getBoundingClientRect();
    const at = (((event.clientX - box.left) / box.width) * width - left) / (width - left - 6);
    return Math.min(count, Math.max(1, Math.round(1 + at * count)));
  };
  svg.addEventListener("pointermove", (event) => tooltip.show(event, ...describe(tokenAt(event))));
  svg.addEventListener("pointerleave", () => tooltip.hide());
  svg.addEventListener("click", (event) => goTo(tokenAt(event)));
  host.classList.add("heat");
  host.replaceChildren(svg);
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
  const tokens = formatNumber(data.ids.length - 1);
  byId("summary").textContent = `${tokens} ${data.unit}s, ${layers.length} layers of ${Math.max(...layers.map((one) => one.heads))} heads. Point at a ${data.unit} for its numbers.`;
  const notes = [];
  if (data.leftOut) notes.push(`The text goes on for ${formatNumber(data.leftOut)} ${data.unit}s that are not shown; sympow inspect --tokens shows more.`);
  if (layers.some((layer) => layer.pairs)) notes.push("Gates or rotations of this model act on pairs of a head; shown is the mean over pairs, of log γ and of β.");
  if (notes.length) byId("notes").append(make("div", { class: "notes" }, make("ul", {}, notes.map((note) => make("li", {}, note)))));

  byId("layer").append(...layers.map((layer, n) => option(n, n, false)));
  const forgets = layers.some((layer) => layer.forgetting), turns = layers.some((layer) => layer.beta);
  for (const [value, there] of [["both", forgets && turns], ["forgetting", forgets], ["turning", turns]]) {
    byId("quantity").querySelector(`[value=${value}]`).disabled = !there;
  }
  byId("quantity").value = forgets && turns ? "both" : forgets ? "forgetting" : "turning";
  fillHeads();
  startTheme(byId("theme"));
  byId("layer").addEventListener("input", () => (fillHeads(), redraw()));
  for (const id of ["head", "quantity", "same-scale"]) byId(id).addEventListener("input", redraw);

  const text = byId("text");
  text.addEventListener("pointermove", (event) => {
    const token = event.target.closest(".token");
    if (token) tooltip.show(event, ...describe(Number(token.dataset.token)));
    else tooltip.hide();
  });
  text.addEventListener("pointerleave", () => tooltip.hide());
  // On paper all of it is in view.
  addEventListener("beforeprint", () => blocks.forEach(paint));
  makeBlocks();
  redraw();
  let width = byId("profile").clientWidth;
  new ResizeObserver(() => {
    if (byId("profile").clientWidth === width) return;
    width = byId("profile").clientWidth;
    drawProfile(overviewOf(chosen().layer));
  }).observe(byId("profile"));
}

start();
