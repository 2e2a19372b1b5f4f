// The page of `sympow serve`, a client of its API. Whatever comes from the server is shown as text, never as HTML.

// Milliseconds between two looks at documents that are being read, and at a server that cannot be reached.
const LOOK_EVERY = 400;
const RETRY_EVERY = 3000;
const KEY = "sympow-api-key";
// Characters of a document's name that the server accepts.
const LONGEST_NAME = 200;

const byId = (id) => document.getElementById(id);
/** A copy of the element in a <template>. */
const copyOf = (id) => byId(id).content.firstElementChild.cloneNode(true);

/** Shows a text in an element, which the style sheet hides if it is empty. Screen readers say what changes. */
function say(element, text = "") {
  if (element.textContent !== text) element.textContent = text;
}

const formatCount = (count, unit) => `${count.toLocaleString("en")} ${unit}${count === 1 ? "" : "s"}`;
/** A whole number from 10 on. */
const formatRate = (rate) => `${rate >= 10 ? Math.round(rate).toLocaleString("en") : rate.toPrecision(2)} tokens/s`;

function formatBytes(bytes) {
  const place = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, bytes)) / 3)));
  return `${Number((bytes / 1000 ** place).toPrecision(3))} ${["bytes", "kB", "MB", "GB", "TB"][place]}`;
}

function formatSeconds(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds < 10 ? seconds.toPrecision(2) : Math.round(seconds)} s`;
}

// --- requests ------------------------------------------------------------------------------------------------------

/** The server refused, or failed: the message says so in words for the reader. */
const serverError = (message, status = 0) => Object.assign(new Error(message), { status });

async function explain(response) {
  const said = await response.json().then((body) => body?.error?.message, () => null);
  const after = response.headers.get("Retry-After");
  const first = {
    413: "This is more than the server accepts.",
    429: `The server is busy. Try again ${after > 0 ? `in ${formatCount(Number(after), "second")}` : "later"}.`,
    503: "The server is not ready, or it is shutting down.",
  }[response.status] ?? (response.status >= 500 || !said ? `The server answered with ${`${response.status} ${response.statusText}`.trim()}.` : null);
  return serverError([first, said].filter(Boolean).join("\n"), response.status);
}

/** What to tell the reader about an error that `send` raised. */
function wordsFor(error, otherwise = "The server cannot be reached. Is sympow serve still running?") {
  return error.status === undefined ? otherwise : error.message;
}

/** Sends a request with the API key, asking for one if need be, and raises what is not a success. */
async function send(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await fetch(path, { ...options, headers: { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) } });
    if (response.ok) return response;
    if (response.status !== 401) throw await explain(response);
    await anotherKey(key);
  }
}

const fetchJson = async (path, options) => (await send(path, options)).json();

/** Waits until the reader has entered another key than this one, which was refused. */
async function anotherKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return;
  const dialog = byId("key-dialog");
  say(byId("key-error"), refused ? "The server does not accept this key." : "");
  if (!dialog.open) dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
}

byId("key-form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  byId("forget-key").hidden = false;
});

byId("forget-key").hidden = !sessionStorage.getItem(KEY);
byId("forget-key").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

// --- documents -----------------------------------------------------------------------------------------------------

// As the server describes it.
let model = null;
// By id: {context: as the server describes it, row}.
const known = new Map();
// Ids of those that were deleted here.
const deleted = new Set();
// The document to choose once it is read: the last one uploaded here, unless the reader chose another since.
let awaited = null;
// Uploads under way: a document that appears on the server meanwhile may be one of them, which have rows already.
let uploading = 0;

const chosenContext = () => known.get(document.querySelector('[name="document"]:checked').value)?.context;
const nameOf = (context) => context.name || context.id;

function describeContext(context) {
  // Its own size is known when it is ready. Until then it is that of any state of the model, unless those grow.
  const bytes = context.nbytes ?? model?.state_bytes;
  const state = bytes && `state ${formatBytes(bytes)}`;
  if (context.status === "ready") return [formatCount(context.tokens ?? 0, "token"), state].filter(Boolean).join(" · ");
  if (context.status !== "reading") return "could not be read";
  if (!context.tokens) return "reading…";
  const read = `${(context.tokens_read ?? 0).toLocaleString("en")} of ${formatCount(context.tokens, "token")}`;
  return [read, state && `${state}, and stays so`].filter(Boolean).join(" · ");
}

/** A row for a document: below "No document", the newest first. */
function makeRow() {
  const row = copyOf("document-row");
  byId("document-list").firstElementChild.after(row);
  return row;
}

function labelRow(row, name, action, onclick) {
  Object.assign(row.querySelector(".name"), { textContent: name, title: name });
  Object.assign(row.querySelector("button"), { textContent: action, ariaLabel: `${action} ${name}`, onclick });
}

/** Adds a document, or shows what has changed about it. */
function showContext(context, uploaded) {
  const entry = known.get(context.id) ?? { row: uploaded ?? makeRow() };
  const { row, context: before } = entry;
  known.set(context.id, Object.assign(entry, { context }));
  labelRow(row, nameOf(context), "Delete", () => removeDocument(context));
  say(row.querySelector(".facts"), describeContext(context));
  say(row.querySelector(".error"), context.error ?? "");
  const [radio, bar] = [row.querySelector("input"), row.querySelector("progress")];
  bar.hidden = context.status !== "reading";
  if (context.tokens) Object.assign(bar, { max: context.tokens, value: context.tokens_read ?? 0 });
  Object.assign(radio, { value: context.id, disabled: context.status !== "ready" });
  if (!radio.disabled && awaited === context.id) {
    radio.checked = true;
    awaited = null;
    showChosen();
  }
  if (before?.status === "reading" && bar.hidden) byId("status").textContent = `${nameOf(context)}: ${radio.disabled ? "could not be read" : "read"}`;
}

function forget(id) {
  const { row } = known.get(id);
  const [none, focused] = [document.querySelector('[name="document"][value=""]'), row.contains(document.activeElement)];
  if (row.querySelector("input").checked) none.checked = true;
  row.remove();
  known.delete(id);
  if (focused) document.querySelector('[name="document"]:checked').focus();
  showChosen();
}

async function removeDocument(context) {
  if (!confirm(`Delete “${nameOf(context)}” from the server?`)) return;
  say(byId("document-error"));
  const error = await send(`v1/contexts/${encodeURIComponent(context.id)}`, { method: "DELETE" }).then(() => null, (refused) => refused);
  if (error && error.status !== 404) return say(byId("document-error"), wordsFor(error));
  deleted.add(context.id);
  if (known.has(context.id)) forget(context.id);
}

let looking = false, nextLook;

/** Asks the server for its model and its documents: once, or for as long as it cannot be reached or reads a document. */
async function look() {
  if (looking) return;
  looking = true;
  clearTimeout(nextLook);
  let pause = LOOK_EVERY;
  try {
    if (!model) showModel((await fetchJson("v1/models")).data[0]);
    const before = [...known.keys()];
    const { data } = await fetchJson("v1/contexts");
    // Documents that were uploaded or deleted here meanwhile need not be in the answer, or may still be.
    for (const id of before) if (known.has(id) && !data.some((context) => context.id === id)) forget(id);
    // The newest comes first there, and rows are added above others.
    for (const context of data.reverse()) if (known.has(context.id) || (!deleted.has(context.id) && !uploading)) showContext(context);
    say(byId("trouble"));
  } catch (error) {
    say(byId("trouble"), wordsFor(error));
    pause = RETRY_EVERY;
  }
  looking = false;
  const reading = [...known.values()].some(({ context }) => context.status === "reading");
  if (reading || pause === RETRY_EVERY) nextLook = setTimeout(look, pause);
}

function showModel(served) {
  model = served;
  say(byId("model"), model.id);
  document.title = `${model.id} · sympow`;
  byId("generate").disabled = false;
  // Of other models, states grow.
  if (model.state_bytes) say(byId("about-documents"), byId("about-documents").dataset.states);
}

/** Sends a document, and tells whether the server took it. */
async function upload(file) {
  const cancel = new AbortController();
  const name = file.name.slice(0, LONGEST_NAME);
  const row = makeRow();
  labelRow(row, name, "Cancel", () => cancel.abort());
  const body = new FormData();
  body.append("name", name);
  body.append("file", file);
  uploading += 1;
  try {
    const context = await fetchJson("v1/contexts", { method: "POST", body, signal: cancel.signal });
    awaited = context.id;
    showContext(context, row);
    return true;
  } catch (error) {
    row.remove();
    // A server may close the connection instead of taking all of what it refuses.
    const cut = "The upload was cut off: the file is more than the server accepts, or the server is gone.";
    if (!cancel.signal.aborted) say(byId("document-error"), `${name}: ${wordsFor(error, cut)}`);
    return false;
  } finally {
    uploading -= 1;
    look();
  }
}

async function uploadAll(files) {
  say(byId("document-error"));
  for (const file of files) await upload(file);
}

byId("upload").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", ({ target }) => {
  const files = [...target.files];
  // So that the same file can be chosen again.
  target.value = "";
  uploadAll(files);
});
byId("paste-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = byId("paste-name").value.trim() || byId("paste-name").placeholder;
  say(byId("document-error"));
  if (!await upload(new File([byId("paste-text").value], name))) return;
  event.target.reset();
  byId("paste").open = false;
});
byId("document-list").addEventListener("change", () => {
  awaited = null;
  showChosen();
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    // Without a related target the pointer has left the window.
    document.body.classList.toggle("dropping", kind === "dragover" || (kind === "dragleave" && event.relatedTarget !== null));
    if (kind === "drop") uploadAll([...event.dataTransfer.files]);
  });
}

// --- prompts and answers -------------------------------------------------------------------------------------------

// The generation at hand: an AbortController.
let running = null;

/** Tells what the prompt continues. */
function showChosen() {
  const context = chosenContext();
  byId("prompt-label").textContent = context ? `The model continues “${nameOf(context)}” followed by this text` : "The model continues this text";
}

function readSettings() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const unescaped = { n: "\n", t: "\t", "\\": "\\" };
  const stop = byId("stop").value.split("\n").filter(Boolean).map((line) => line.replace(/\\([nt\\])/g, (_, sign) => unescaped[sign]));
  return {
    temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("max-tokens"), seed: number("seed"),
    stop: stop.length ? stop : undefined,
  };
}

function describeSettings({ temperature, top_p, max_tokens, seed, stop }) {
  return [
    `temperature ${temperature}`, `top-p ${top_p}`, `at most ${formatCount(max_tokens ?? 0, "token")}`,
    seed !== undefined && `seed ${seed}`, stop && formatCount(stop.length, "stop string"),
  ].filter(Boolean).join(", ");
}

/** The objects of a stream of server-sent events, up to [DONE]. Raises an error if it ends before. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw serverError("The connection ended before the text did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    // Each event is one line of data; others are empty or comments that keep the connection alive.
    for (const said of lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim())) {
      if (said === "[DONE]") return;
      yield JSON.parse(said);
    }
  }
}

const ENDINGS = { stop: "ended by itself", length: "cut at max tokens", cancelled: "stopped by the server", error: "failed" };

/** The numbers of a generation so far; times in milliseconds. */
function describeProgress({ sent, first, last, tokens, usage, ending }) {
  if (first === null) return ending ?? "waiting for the first token…";
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return [
    `first token after ${formatSeconds((first - sent) / 1000)}`,
    last > first && formatRate(((tokens - 1) / (last - first)) * 1000),
    `${usage ? "" : "about "}${formatCount(tokens, "token")}`,
    usage && `prompt ${formatCount(usage.prompt_tokens, "token")}${cached ? `, ${cached.toLocaleString("en")} of them cached` : ""}`,
    ending,
  ].filter(Boolean).join(" · ");
}

function makeCard(prompt, context, settings) {
  const card = copyOf("answer-card");
  const parts = { ".given": prompt, ".settings-used": describeSettings(settings) };
  if (context) Object.assign(parts, { ".after": `After ${formatCount(context.tokens ?? 0, "token")} of `, b: nameOf(context) });
  for (const [place, text] of Object.entries(parts)) card.querySelector(place).textContent = text;
  byId("answers").prepend(card);
  card.scrollIntoView({ block: "nearest", behavior: "instant" });
  return card;
}

async function generate() {
  const [context, prompt, settings] = [chosenContext(), byId("prompt").value, readSettings()];
  const card = makeCard(prompt, context, settings);
  const [text, stop] = [card.querySelector(".continuation"), card.querySelector("button")];
  const progress = { sent: performance.now(), first: null, last: null, tokens: 0, usage: null, ending: null };
  let waiting = "", frame = 0;
  /** Shows what has come, once a frame, while the window follows the end of the text if that is in view. */
  const show = () => {
    frame = 0;
    const followed = card.getBoundingClientRect().bottom < innerHeight + 60;
    text.append(waiting);
    waiting = "";
    card.querySelector(".facts").textContent = describeProgress(progress);
    if (followed) card.scrollIntoView({ block: "nearest", behavior: "instant" });
  };
  const count = ({ usage, choices: [choice] = [] }) => {
    progress.usage = usage ?? progress.usage;
    if (!choice) return;
    progress.ending = ENDINGS[choice.finish_reason] ?? progress.ending;
    waiting += choice.text;
    if (choice.finish_reason && !choice.text) return;
    progress.last = performance.now();
    progress.first ??= progress.last;
    // About one for each token; the usage at the end has their number.
    progress.tokens += 1;
  };

  running = new AbortController();
  const { signal } = running;
  stop.addEventListener("click", () => running?.abort());
  show();
  byId("status").textContent = "Generating";
  if (document.activeElement === byId("generate")) stop.focus({ preventScroll: true });
  byId("generate").disabled = true;
  try {
    const body = { model: model.id, prompt, context: context?.id, ...settings, stream: true, stream_options: { include_usage: true } };
    const headers = { "Content-Type": "application/json" };
    const response = await send("v1/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const event of eventsOf(response)) {
      if (event.error) throw serverError(event.error.message ?? "The server failed.");
      count(event);
      frame ||= requestAnimationFrame(show);
    }
    progress.tokens = progress.usage?.completion_tokens ?? progress.tokens;
  } catch (error) {
    progress.ending = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) say(card.querySelector(".error"), wordsFor(error));
    // The document may be gone.
    if (error.status === 404) look();
  } finally {
    cancelAnimationFrame(frame);
    show();
    card.removeAttribute("aria-busy");
    byId("generate").disabled = false;
    if (document.activeElement === stop) byId("generate").focus({ preventScroll: true });
    stop.remove();
    running = null;
    byId("status").textContent = `Text ${progress.ending ?? "finished"}, ${formatCount(progress.tokens, "token")}`;
  }
}

byId("settings").open = matchMedia("(min-width: 56rem)").matches;
// A field that does not pass its check must be in view to say so.
byId("settings").addEventListener("invalid", () => (byId("settings").open = true), { capture: true });
byId("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (model && !running) generate();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask-form").requestSubmit();
});
addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
addEventListener("visibilitychange", () => document.hidden || look());
look();
