// The page of `sympow serve`, a client of its API. Whatever comes from the server is shown as text, never as HTML.

// Milliseconds between two looks at documents that are being read, and at a server that cannot be reached.
const LOOK_EVERY = 400;
const RETRY_EVERY = 3000;
// Milliseconds between two updates of the numbers of a text that is being generated.
const COUNT_EVERY = 200;
const KEY = "sympow-api-key";
// Characters of a document's name that the server accepts.
const LONGEST_NAME = 200;

// Said of models whose states do not grow.
const ABOUT_STATES = "A document is read once, into a state whose size does not depend on the document's length. Every prompt then starts from that state.";

const byId = (id) => document.getElementById(id);
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** An HTML element. Attributes that start with "on" are event listeners; strings among the children become text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Shows a text in an element, or hides the element if there is none. */
function say(element, text) {
  if (element.textContent !== (text ?? "")) element.textContent = text ?? "";
  element.hidden = !text;
}

// --- numbers -------------------------------------------------------------------------------------------------------

function formatCount(count, unit) {
  return `${count.toLocaleString("en")} ${unit}${count === 1 ? "" : "s"}`;
}

function formatBytes(bytes) {
  const place = Math.min(4, Math.max(0, Math.floor(Math.log10(Math.max(1, bytes)) / 3)));
  return `${Number((bytes / 1000 ** place).toPrecision(3))} ${["bytes", "kB", "MB", "GB", "TB"][place]}`;
}

function formatSeconds(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(2))} s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${Number((seconds / 3600).toPrecision(2))} h`;
}

/** Tokens a second: a whole number from 10 on. */
function formatRate(rate) {
  return `${rate >= 10 ? Math.round(rate).toLocaleString("en") : rate.toPrecision(2)} tokens/s`;
}

// --- requests ------------------------------------------------------------------------------------------------------

/** The server refused, or failed; `message` says so in words for the reader. */
class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function explain(response) {
  const said = await response.json().then((body) => body?.error?.message, () => null);
  const after = response.headers.get("Retry-After");
  // A number of seconds or a date.
  const seconds = after === null ? NaN : Number.isNaN(Number(after)) ? (Date.parse(after) - Date.now()) / 1000 : Number(after);
  const first = {
    413: "This is more than the server accepts.",
    429: `The server is busy. Try again ${seconds > 0 ? `in ${formatCount(Math.ceil(seconds), "second")}` : "later"}.`,
    503: "The server is not ready, or it is shutting down.",
  }[response.status] ?? (response.status >= 500 || !said ? `The server answered with ${`${response.status} ${response.statusText}`.trim()}.` : null);
  return new ServerError([first, said].filter(Boolean).join("\n"), response.status);
}

/** What to tell the reader about an error that `send` raised. */
function wordsFor(error) {
  return error instanceof ServerError ? error.message : "The server cannot be reached. Is sympow serve still running?";
}

/**
 * Sends a request with the API key, asking for one if need be, and raises what is not a success.
 *
 * options: those of `fetch`, and
 *   onsend(): called when the request leaves, again if it is repeated with another key,
 *   deliver(path, options): instead of `fetch`.
 */
async function send(path, { onsend, deliver = fetch, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    onsend?.();
    const response = await deliver(path, { ...options, headers: { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) } });
    if (response.ok) return response;
    if (response.status !== 401) throw await explain(response);
    await anotherKey(key, options.signal);
  }
}

async function fetchJson(path, options) {
  return (await send(path, options)).json();
}

function postJson(path, body, options) {
  return send(path, { ...options, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

/** As `fetch`, but tells the share of the body that has left. */
function deliverWithProgress(onprogress) {
  return (path, { method, headers, body, signal }) => new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(method, path);
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => event.lengthComputable && onprogress(event.loaded / event.total));
    request.addEventListener("load", () => {
      const kept = ["Content-Type", "Retry-After"].flatMap((name) => {
        const value = request.getResponseHeader(name);
        return value === null ? [] : [[name, value]];
      });
      resolve(new Response(request.responseText, { status: request.status, statusText: request.statusText, headers: kept }));
    });
    // A server may close the connection instead of taking all of what it refuses.
    request.addEventListener("error", () => reject(new ServerError("The upload was cut off: the file is more than the server accepts, or the server is gone.", 0)));
    request.addEventListener("abort", () => reject(new DOMException("cancelled", "AbortError")));
    signal?.addEventListener("abort", () => request.abort());
    request.send(body);
  });
}

// --- the API key ---------------------------------------------------------------------------------------------------

let keyEntered = [];

/** Waits until the reader has entered another key than this one, which was refused. */
function anotherKey(refused, signal) {
  if (sessionStorage.getItem(KEY) !== refused) return null;
  say(byId("key-error"), refused ? "The server does not accept this key." : null);
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  if (!model) say(byId("model"), "Waiting for the API key");
  return new Promise((resolve, reject) => {
    keyEntered.push(resolve);
    signal?.addEventListener("abort", () => reject(new DOMException("cancelled", "AbortError")));
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("forget-key").hidden = false;
  const waiting = keyEntered;
  keyEntered = [];
  for (const go of waiting) go();
});

byId("forget-key").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});

// --- documents -----------------------------------------------------------------------------------------------------

// By id: {context: as the server describes it, row, since: when and where it was first seen being read}.
const known = new Map();
// Ids of those that were deleted here.
const deleted = new Set();
// The document to choose once it is read: the last one uploaded here, unless the reader chose another since.
let awaited = null;

const chosenId = () => document.querySelector('[name="document"]:checked').value;
const pathOf = (id) => `v1/contexts/${encodeURIComponent(id)}`;

function describeContext({ context, since }) {
  // Its own size is known when it is ready. Until then it is that of any state of the model, unless those grow.
  const bytes = context.nbytes ?? model?.state_bytes;
  const state = bytes && `state ${formatBytes(bytes)}`;
  if (context.status === "ready") return [formatCount(context.tokens ?? 0, "token"), state].filter(Boolean).join(" · ");
  if (context.status !== "reading") return "could not be read";
  if (!context.tokens) return "reading…";
  const read = context.tokens_read ?? 0;
  const elapsed = since ? (performance.now() - since.time) / 1000 : 0;
  const rate = elapsed > 0.9 && read > since.read ? (read - since.read) / elapsed : null;
  return [
    `${read.toLocaleString("en")} of ${formatCount(context.tokens, "token")}`,
    state && `${state}, and stays so`,
    rate && `${formatRate(rate)}, ${formatSeconds((context.tokens - read) / rate)} left`,
  ].filter(Boolean).join(" · ");
}

/** Adds a document, or shows what has changed about it. */
function showContext(context) {
  const entry = known.get(context.id) ?? { row: makeRow(context.id) };
  const before = entry.context?.status;
  entry.context = context;
  if (context.status === "reading") entry.since ??= { time: performance.now(), read: context.tokens_read ?? 0 };
  known.set(context.id, entry);

  const { row } = entry;
  const name = context.name || context.id;
  row.querySelector(".name").textContent = row.querySelector(".name").title = name;
  row.querySelector("button").setAttribute("aria-label", `Delete ${name}`);
  say(row.querySelector(".facts"), describeContext(entry));
  say(row.querySelector(".error"), context.status === "failed" ? context.error : null);
  const bar = row.querySelector("progress");
  bar.hidden = context.status !== "reading";
  if (context.tokens) [bar.max, bar.value] = [context.tokens, context.tokens_read ?? 0];
  const radio = row.querySelector("input");
  radio.disabled = context.status !== "ready";
  if (context.status === "ready" && awaited === context.id) {
    radio.checked = true;
    awaited = null;
    chosen();
  }
  if (before === "reading" && context.status !== "reading") byId("status").textContent = `${name}: ${context.status === "ready" ? "read" : "could not be read"}`;
}

function makeRow(id) {
  const row = make("li", { class: "document" },
    make("label", { class: "choice" }, make("input", { type: "radio", name: "document", value: id }), " ", make("span", { class: "name" })),
    make("button", { type: "button", class: "quiet", onclick: () => remove(id) }, "Delete"),
    make("progress", { "aria-label": "Share that is read" }),
    make("p", { class: "facts" }),
    make("p", { class: "error" }),
  );
  // Below "No document", the newest first.
  byId("document-list").firstElementChild.after(row);
  return row;
}

function forget(id) {
  const { row } = known.get(id);
  const [wasChosen, hadFocus] = [row.querySelector("input").checked, row.contains(document.activeElement)];
  row.remove();
  known.delete(id);
  const none = document.querySelector('[name="document"][value=""]');
  if (wasChosen) none.checked = true;
  if (hadFocus) document.querySelector('[name="document"]:checked').focus();
  chosen();
}

async function remove(id) {
  const { context } = known.get(id);
  if (!confirm(`Delete “${context.name || id}” from the server?`)) return;
  say(byId("document-error"), null);
  try {
    await send(pathOf(id), { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) {
      say(byId("document-error"), wordsFor(error));
      return;
    }
  }
  deleted.add(id);
  if (known.has(id)) forget(id);
}

/** Asks the server which documents it has. */
async function refresh() {
  const before = [...known.keys()];
  const { data } = await fetchJson("v1/contexts");
  const ids = new Set(data.map((context) => context.id));
  // Documents that were uploaded or deleted here meanwhile need not be in the answer, or may still be.
  for (const id of before) if (!ids.has(id) && known.has(id)) forget(id);
  // The newest comes first there, and rows are added above others.
  for (const context of data.reverse()) if (!deleted.has(context.id)) showContext(context);
  watch();
}

let watching = false;

/** Looks at documents that are being read until none is left. */
async function watch() {
  if (watching) return;
  watching = true;
  for (;;) {
    const reading = [...known.values()].filter(({ context }) => context.status === "reading");
    if (!reading.length) break;
    let pause = LOOK_EVERY;
    for (const { context: { id } } of reading) {
      try {
        const context = await fetchJson(pathOf(id));
        if (known.has(id)) showContext(context);
        say(byId("trouble"), null);
      } catch (error) {
        if (error.status === 404 && known.has(id)) forget(id);
        else {
          say(byId("trouble"), wordsFor(error));
          pause = RETRY_EVERY;
        }
      }
    }
    await sleep(pause);
  }
  watching = false;
}

/** Sends a document: `body` is a form with a file, or {text, name}. */
async function upload(name, body) {
  const cancel = new AbortController();
  const facts = make("p", { class: "facts" }, "uploading…");
  const bar = make("progress", { "aria-label": "Share that is uploaded", max: 1 });
  const row = make("li", { class: "document" },
    make("span", { class: "choice" }, make("span", { class: "name" }, name)),
    make("button", { type: "button", class: "quiet", "aria-label": `Cancel the upload of ${name}`, onclick: () => cancel.abort() }, "Cancel"),
    bar, facts,
  );
  byId("document-list").firstElementChild.after(row);
  const deliver = deliverWithProgress((share) => {
    bar.value = share;
    facts.textContent = share < 1 ? `uploading, ${Math.floor(share * 100)} %` : "uploaded";
  });
  try {
    const options = { signal: cancel.signal, deliver };
    const response = body instanceof FormData ? await send("v1/contexts", { ...options, method: "POST", body }) : await postJson("v1/contexts", body, options);
    const context = await response.json();
    awaited = context.id;
    showContext(context);
    watch();
    return true;
  } catch (error) {
    if (error.name !== "AbortError") say(byId("document-error"), `${name}: ${wordsFor(error)}`);
    return false;
  } finally {
    row.remove();
  }
}

async function uploadFiles(files) {
  say(byId("document-error"), null);
  for (const file of files) {
    const form = new FormData();
    const name = file.name.slice(0, LONGEST_NAME);
    form.append("name", name);
    form.append("file", file);
    await upload(name, form);
  }
}

function startDocuments() {
  byId("upload").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", ({ target }) => {
    const files = [...target.files];
    // So that the same file can be chosen again.
    target.value = "";
    uploadFiles(files);
  });
  byId("paste-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    say(byId("document-error"), null);
    const name = byId("paste-name").value.trim() || byId("paste-name").placeholder;
    if (!await upload(name, { text: byId("paste-text").value, name })) return;
    byId("paste-form").reset();
    byId("paste").open = false;
  });
  byId("document-list").addEventListener("change", () => {
    awaited = null;
    chosen();
  });
  const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    // Without a related target the pointer has left the window.
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    if (!carriesFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("dropping");
    uploadFiles([...event.dataTransfer.files]);
  });
}

// --- prompts and answers -------------------------------------------------------------------------------------------

// As the server describes it.
let model = null;
// The generation at hand: an AbortController.
let running = null;

/** Tells what the prompt continues. */
function chosen() {
  const context = known.get(chosenId())?.context;
  byId("prompt-label").textContent = context ? `The model continues “${context.name || context.id}” followed by this text` : "The model continues this text";
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

/** The objects of a stream of server-sent events, up to [DONE]. Raises a ServerError if it ends before. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError("The connection ended before the text did.", 0);
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        // Each event is one line of data; others are empty or comments that keep the connection alive.
        if (!line.startsWith("data:")) continue;
        const said = line.slice(5).trim();
        if (said === "[DONE]") return;
        yield JSON.parse(said);
      }
    }
  } finally {
    reader.cancel().catch(() => null);
  }
}

const ENDINGS = { stop: "ended by itself", length: "cut at max tokens", cancelled: "stopped by the server", error: "failed" };

/** The numbers of a generation so far; times in milliseconds. */
function describeProgress({ sent, first, last, tokens, usage, ending }) {
  const rate = first !== null && tokens > 1 && last > first ? ((tokens - 1) / (last - first)) * 1000 : null;
  const prompt = usage && formatCount(usage.prompt_tokens, "token");
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return [
    first === null ? ending ?? "waiting for the first token…" : `first token after ${formatSeconds((first - sent) / 1000)}`,
    rate && formatRate(rate),
    first !== null && `${usage ? "" : "about "}${formatCount(tokens, "token")}`,
    prompt && `prompt ${prompt}${cached ? `, ${cached.toLocaleString("en")} of them cached` : ""}`,
    first !== null && ending,
  ].filter(Boolean).join(" · ");
}

/** A text to which strings are added once a frame, while the window follows its end if that is in view. */
class GrowingText {
  constructor(card, node) {
    Object.assign(this, { card, node, waiting: "", frame: 0 });
  }

  add(text) {
    this.waiting += text;
    this.frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const followed = this.card.getBoundingClientRect().bottom < innerHeight + 60;
    this.node.appendData(this.waiting);
    this.waiting = "";
    if (followed) this.card.scrollIntoView({ block: "nearest", behavior: "instant" });
  }
}

function makeCard(prompt, context, settings) {
  const start = context ? `After ${formatCount(context.tokens ?? 0, "token")} of ` : "";
  const text = document.createTextNode("");
  const parts = {
    text, facts: make("p", { class: "facts" }), error: make("p", { class: "error", role: "alert", hidden: "" }),
    stop: make("button", { type: "button", title: "Esc" }, "Stop"),
  };
  const title = make("h3", {}, start, ...(context ? [make("b", {}, context.name || context.id), " · "] : []), describeSettings(settings));
  parts.card = make("article", { class: "answer card", "aria-busy": "true" }, title,
    make("p", { class: "text" }, make("span", { class: "given" }, prompt), make("span", { class: "continuation" }, text)),
    parts.error, make("footer", {}, parts.facts, parts.stop));
  return parts;
}

async function generate() {
  const context = known.get(chosenId())?.context;
  const [prompt, settings] = [byId("prompt").value, readSettings()];
  const { card, text, facts, error: problem, stop } = makeCard(prompt, context, settings);
  const growing = new GrowingText(card, text);
  const progress = { sent: performance.now(), first: null, last: null, tokens: 0, usage: null, ending: null };
  const count = () => (facts.textContent = describeProgress(progress));

  running = new AbortController();
  const { signal } = running;
  stop.addEventListener("click", () => running?.abort());
  byId("answers").prepend(card);
  count();
  const counting = setInterval(count, COUNT_EVERY);
  byId("status").textContent = "Generating";
  if (document.activeElement === byId("generate")) stop.focus({ preventScroll: true });
  byId("generate").disabled = true;
  card.scrollIntoView({ block: "nearest", behavior: "instant" });
  try {
    const body = { model: model.id, prompt, context: context?.id, ...settings, stream: true, stream_options: { include_usage: true } };
    const response = await postJson("v1/completions", body, { signal, onsend: () => (progress.sent = performance.now()) });
    for await (const event of eventsOf(response)) {
      if (event.error) throw new ServerError(event.error.message ?? "The server failed.", 0);
      progress.usage = event.usage ?? progress.usage;
      const choice = event.choices?.[0];
      if (choice) {
        progress.ending = ENDINGS[choice.finish_reason] ?? progress.ending;
        if (choice.text || !choice.finish_reason) {
          progress.last = performance.now();
          progress.first ??= progress.last;
          // About one for each token; the usage at the end has their number.
          progress.tokens += 1;
        }
        if (choice.text) growing.add(choice.text);
      }
    }
    progress.tokens = progress.usage?.completion_tokens ?? progress.tokens;
  } catch (error) {
    if (signal.aborted) progress.ending = "stopped";
    else {
      progress.ending = "failed";
      say(problem, wordsFor(error));
      // The document may be gone.
      if (error.status === 404) refresh().catch(() => null);
    }
  } finally {
    clearInterval(counting);
    growing.flush();
    count();
    card.removeAttribute("aria-busy");
    byId("generate").disabled = false;
    if (document.activeElement === stop) byId("generate").focus({ preventScroll: true });
    stop.remove();
    running = null;
    byId("status").textContent = `Text ${progress.ending ?? "finished"}, ${formatCount(progress.tokens, "token")}`;
  }
}

function startPrompts() {
  const settings = byId("settings");
  const showSettings = () => (byId("settings-now").textContent = settings.open ? "" : describeSettings(readSettings()));
  settings.open = matchMedia("(min-width: 56rem)").matches;
  settings.addEventListener("toggle", showSettings);
  settings.addEventListener("input", showSettings);
  // A field that does not pass its check must be in view to say so.
  settings.addEventListener("invalid", () => (settings.open = true), { capture: true });
  showSettings();
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (model && !running) generate();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask-form").requestSubmit();
  });
  addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
}

// --- start ---------------------------------------------------------------------------------------------------------

async function connect() {
  for (;;) {
    try {
      [model] = (await fetchJson("v1/models")).data;
      say(byId("model"), model.id);
      document.title = `${model.id} · sympow`;
      byId("generate").disabled = false;
      if (model.state_bytes) say(byId("about-documents"), ABOUT_STATES);
      await refresh();
      say(byId("trouble"), null);
      return;
    } catch (error) {
      say(byId("trouble"), wordsFor(error));
      await sleep(RETRY_EVERY);
    }
  }
}

byId("forget-key").hidden = !sessionStorage.getItem(KEY);
startDocuments();
startPrompts();
await connect();
addEventListener("visibilitychange", () => document.hidden || refresh().catch((error) => say(byId("trouble"), wordsFor(error))));
