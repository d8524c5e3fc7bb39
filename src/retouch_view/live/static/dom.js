// Elements, requests and the formatting of numbers. Text from runs is only ever set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "text", "circle", "rect", "g", "polyline", "polygon", "title"]);

/** An element. Attributes that start with "on" are listeners; false, null and undefined are left out. */
export function h(name, attributes = {}, ...children) {
  const svg = SVG_TAGS.has(name) && name !== "title";
  const element = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked") element[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replaces what an element contains; null, undefined and false are left out. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** The JSON of an address. Throws an Error with a sentence for people. */
export async function load(address, options = {}) {
  const reply = await fetch(address, { ...options, headers: { Accept: "application/json", ...options.headers } }).catch(() => null);
  if (reply === null) throw new Error("The server does not answer. Is `retouch view` still running?");
  if (reply.status === 401) throw new Error("The page has no valid token. Open the address that `retouch view` printed.");
  if (!reply.ok) throw new Error((await reply.json().catch(() => ({}))).error ?? `The server replied ${reply.status}.`);
  return reply.json();
}

/** Sends JSON, and returns the JSON of the reply. Throws an Error with a sentence for people. */
export function send(address, value, signal) {
  return load(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value), signal });
}

let found = null;

/** What this page may do besides reading, from the options of `retouch view`. */
export function features() {
  found ??= load("/api/features");
  return found;
}

export function number(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(Math.max(digits, size >= 100 ? 4 : digits))));
}

/** A score, with as many decimals as report.html. */
export function score(value) {
  return typeof value === "number" && Number.isFinite(value) ? value.toFixed(Math.abs(value) > 1 ? 2 : 3) : "–";
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** What judges took so far, in words: dollars where a price is known, otherwise requests and tokens. */
export function spent(judges) {
  if (!judges) return "–";
  const requests = (count) => `${COMPACT.format(count)} request${count === 1 ? "" : "s"}`;
  if (judges.cost === null) {
    const tokens = judges.input_tokens + judges.output_tokens;
    return requests(judges.requests) + (tokens ? `, ${COMPACT.format(tokens)} tokens` : "");
  }
  const dollars = `$${judges.cost && judges.cost < 0.1 ? judges.cost.toPrecision(2) : judges.cost.toFixed(2)}`;
  return judges.unpriced ? `${dollars} and ${requests(judges.unpriced)} without a price` : dollars;
}

export function ago(seconds) {
  return typeof seconds === "number" ? `${duration(Math.max(0, Date.now() / 1000 - seconds))} ago` : "–";
}

/** Isolates text of unknown direction from its surroundings. */
export function text(value) {
  return h("bdi", {}, String(value));
}

export function path(...parts) {
  return parts.map(encodeURIComponent).join("/");
}

/** Saves a file from the page. */
export function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

/** A thumbnail with a reserved size, so that nothing moves when it arrives. */
export function thumbnail(name, step, file, alt, size = 96) {
  return h("img", { src: `/thumbnails/${path(name, step, file)}`, alt, width: size, height: size, loading: "lazy", decoding: "async" });
}

/** The result of a run in words, with its numbers: green or red only if the interval of the change excludes 0. */
export function verdict(run) {
  const found = run.verdict;
  return found && h("div", {}, h("p", { class: "verdict" }, text(found.lead), " ", h("strong", { class: found.direction }, found.change), "."),
    h("p", { class: "quiet" }, found.context));
}

const STATES = {
  running: "running", finished: "finished", stopped: "stopped", failed: "failed", alarm: "stopped by a rule",
  waiting: "no step yet", unreadable: "unreadable",
};

export function state(run) {
  return h("span", { class: `state ${Object.hasOwn(STATES, run.state) ? run.state : ""}` }, STATES[run.state] ?? run.state);
}
