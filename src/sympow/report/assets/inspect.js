// The inspector: a text with its tokens colored by the γ and β of one head.

const BLOCK_TOKENS = 400;
const layers = data.layers.map((layer) => ({ ...layer, forgetting: unpack(layer.forgetting), beta: unpack(layer.beta) }));
const tokens = data.texts.map(makeToken);

/** 16-bit codes of every head and token. */
function unpack(text) {
  return text && new Uint16Array(Uint8Array.from(atob(text), (byte) => byte.charCodeAt(0)).buffer);
}

/** −log γ of a token in a head: 0 where nothing is forgotten. */
function decayOf({ layer, head }, token) {
  const code = layers[layer].forgetting[head * data.ids.length + token];
  return code && data.slowest * (data.fastest / data.slowest) ** ((code - 1) / 65534);
}

const betaOf = ({ layer, head }, token) => (layers[layer].beta[head * data.ids.length + token] / 65535) * 2;

const formatHalfLife = (rate) => (rate === 0 ? "never forgets" : `${formatNumber(Math.LN2 / rate)} ${data.unit}s`);

/** Close to 1, as 1 − (1 − γ), whose digits are the ones that matter. */
function formatGamma(rate) {
  const lost = -Math.expm1(-rate);
  if (lost === 0) return "1";
  return lost < 1e-3 ? `1 − ${lost.toExponential(2)}` : String(Number(Math.exp(-rate).toPrecision(5)));
}

const chosen = () => ({ layer: Number(byId("layer").value), head: Number(byId("head").value) });

/** Which of the two is shown, of those that the chosen layer has; both only as colors of the text. */
function shown() {
  const { forgetting, beta } = layers[byId("layer").value];
  const quantity = byId("quantity").value;
  return { forgetting: forgetting && quantity !== "rotation", rotation: beta && quantity !== "forgetting" };
}

function fillHeads() {
  fill(byId("head"), Array.from({ length: layers[byId("layer").value].heads }, (_, head) => [head, head]));
}

function choose(layer, head) {
  byId("layer").value = layer;
  fillHeads();
  byId("head").value = head;
  draw();
}

function makeToken(text, n) {
  const kind = n === 0 ? "token boundary" : text === "" ? "token part" : "token";
  const lines = text.split("\n").flatMap((line, k) => (k ? [make("span", { class: "return", "aria-hidden": "true" }, "⏎"), "\n", line] : [line]));
  return make("span", { class: kind, "data-token": n }, lines);
}

/** Blocks of whole lines, of which the browser styles and draws those in view. */
function makeBlocks() {
  let block = byId("text").appendChild(make("div", { class: "block" }));
  tokens.forEach((token, n) => {
    if (block.childElementCount >= BLOCK_TOKENS && data.texts[n - 1].endsWith("\n")) block = byId("text").appendChild(make("div", { class: "block" }));
    block.append(token);
  });
}

/** Colors every token, between the 5th and the 95th percentile of the decays of this head or of all heads, and from β 0 to 2. */
function paint() {
  const place = chosen(), shows = shown();
  const [low, high] = byId("same-scale").checked ? data.ends : layers[place.layer].ends[place.head];
  tokens.forEach((token, n) => {
    const rate = shows.forgetting ? decayOf(place, n) : 0;
    const forgot = rate && Math.min(1, Math.max(0, Math.log(rate / low) / Math.log(high / low)));
    token.style.setProperty("--forgot", forgot.toFixed(3));
    token.style.setProperty("--rotated", (shows.rotation ? betaOf(place, n) - 1 : 0).toFixed(3));
  });
  byId("slow").textContent = formatHalfLife(low);
  byId("fast").textContent = formatHalfLife(high);
  document.querySelector("main").dataset.shows = Object.keys(shows).filter((name) => shows[name]).join(" ");
}

function describe(n) {
  const place = chosen();
  const { forgetting, beta } = layers[place.layer];
  const text = n === 0 ? data.texts[0] : data.texts[n] === "" ? "part of the next character" : JSON.stringify(data.texts[n]);
  const numbers = { [data.unit]: `${formatNumber(n)} of ${formatNumber(data.ids.length - 1)}, id ${data.ids[n]}` };
  const rate = forgetting && decayOf(place, n);
  if (forgetting) Object.assign(numbers, { "γ": formatGamma(rate), "half-life": formatHalfLife(rate) });
  if (beta) numbers["β"] = betaOf(place, n).toFixed(4);
  const rows = Object.entries(numbers).map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", { class: "number" }, value)));
  return [make("strong", {}, text), make("table", {}, rows)];
}

/** The style sheet puts the label beside the token that is pointed at. */
function showLabel({ target }) {
  const token = target.closest(".token");
  byId("tooltip").hidden = !token;
  if (token) byId("tooltip").replaceChildren(...describe(Number(token.dataset.token)));
}

function goTo(token) {
  document.querySelector(".here")?.classList.remove("here");
  tokens[token].classList.add("here");
  tokens[token].scrollIntoView({ block: "center", behavior: "instant" });
}

/** What the colors show, of all heads and of the chosen one over the whole text; forgetting, if it is both. */
function drawOverview() {
  const { layer, head } = chosen();
  const kind = shown().forgetting ? "forgetting" : "rotation";
  const { name, map, profile, note } = data.overview[kind];
  byId("map-title").textContent = `All heads: ${name}. Click to choose.`;
  const cell = { type: "rect", x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5, line: { color: "var(--mark)", width: 3 } };
  const pick = (event) => choose(...event.points[0].pointNumber);
  drawPlot(byId("map"), { ...map, layout: { ...map.layout, shapes: [cell] } }, { click: pick });

  byId("profile-note").hidden = !note;
  byId("profile-title").textContent = `Layer ${layer}, head ${head}: ${profile.label}. Click to go there.`;
  const trace = { ...profile.traces[0], y: layers[layer].profiles[kind][head] };
  const layout = { ...profile.layout, uirevision: `${kind} ${layer} ${head}` };
  drawPlot(byId("profile"), { ...profile, traces: [trace], layout }, { click: (event) => goTo(event.points[0].x) });
}

function draw() {
  paint();
  drawOverview();
}

makeBlocks();
byId("text").addEventListener("pointerover", showLabel);
byId("text").addEventListener("pointerleave", () => (byId("tooltip").hidden = true));
byId("layer").addEventListener("input", fillHeads);
document.querySelector(".bar").addEventListener("input", ({ target }) => target.id === "theme" || draw());
fillHeads();
draw();
