// Line charts as SVG. A series is { name, points: [[x, y, low, high], ...] }. y may be null; low and high, the ends of a band, may be
// null or left out. dots: mark each point. count: of the points before they were thinned.

import { fill, h, number } from "./dom.js";
import { exportButtons } from "./export.js";

const SIZES = { phone: [190, 140, 2], small: [340, 170, 3], lead: [560, 250, 5], large: [960, 420, 6] }; // width, height, about how many ticks
const LEFT = 46;
const RIGHT = 14;
const BOTTOM = 22;
const TOP = 8;
const MOST_POINTS = 400;
const COUNTED = new Set(["steps", "images made", "requests to judges"]); // axes of whole numbers

/** Round numbers in a range, whose spacing is 1, 2 or 5 times a power of ten. whole: at least 1. */
export function ticks(low, high, about = 4, whole = false) {
  const power = 10 ** Math.floor(Math.log10((high - low) / about));
  let gap = [1, 2, 5, 10].map((factor) => factor * power).find((each) => (high - low) / each <= about) ?? 10 * power;
  if (whole) gap = Math.max(1, gap);
  const found = [];
  for (let tick = Math.ceil(low / gap - 1e-9); tick * gap <= high + 1e-9 * gap; tick += 1) found.push(tick * gap);
  return { gap, found };
}

/** The label of a tick, with as many decimals as distinguish ticks that are a gap apart. */
function tickLabel(tick, gap) {
  if (Math.abs(tick) < 1e-9 * gap) return "0";
  const size = Math.max(Math.abs(tick), gap);
  if (size >= 1e5 || size < 1e-3) return number(tick);
  return tick.toFixed(Math.max(0, -Math.floor(Math.log10(gap) + 1e-9)));
}

/** Means of consecutive points, so that at most MOST_POINTS remain. */
export function thin(points) {
  const size = Math.max(1, Math.ceil(points.length / MOST_POINTS));
  if (size === 1) return points;
  const found = [];
  for (let start = 0; start < points.length; start += size) {
    const part = points.slice(start, start + size).filter(([, y]) => y !== null);
    if (part.length) found.push([0, 1].map((axis) => part.reduce((sum, point) => sum + point[axis], 0) / part.length));
  }
  return found;
}

/** The mean of the last points up to each point, from the first point that has so many; as in report.html. */
export function smoothed(points, width) {
  let [sum, count] = [0, 0];
  const add = (value, sign) => {
    if (typeof value === "number") [sum, count] = [sum + sign * value, count + sign];
  };
  return points.map(([x, y], index) => {
    add(y, 1);
    if (index >= width) add(points[index - width][1], -1);
    return [x, index + 1 >= width && count > 0 ? sum / count : null];
  });
}

function hasBand([, y, low, high]) {
  return typeof y === "number" && typeof low === "number" && typeof high === "number";
}

/** The outline of the bands, one part for each stretch of points that have one. */
function band(points, x, y) {
  const parts = [[]];
  for (const point of points) {
    if (hasBand(point)) parts.at(-1).push(point);
    else parts.push([]);
  }
  const place = (end) => (point) => `${x(point[0]).toFixed(1)} ${y(point[end]).toFixed(1)}`;
  return parts.filter((part) => part.length > 1)
    .map((part) => `M${[...part.map(place(3)), ...part.reverse().map(place(2))].join("L")}Z`).join("");
}

function range(values) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (high === 0 && low === 0) return [0, 1];
  const room = high > low ? (high - low) * 0.05 : Math.abs(high) * 0.1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function line(points, x, y) {
  let drawing = false;
  return points.map(([at, value]) => {
    if (typeof value !== "number") {
      drawing = false;
      return "";
    }
    const command = `${drawing ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = true;
    return command;
  }).join("");
}

/** A chart with a caption, which a click enlarges. options: { caption, help, axis, end: of the axis, marks: [[x, text], ...], dots,
 * smooth: the number of points in the running mean, levels: [[y, text], ...], phases: [[x, text], ...] } */
export function chart(series, options, wanted = "small") {
  const narrow = window.matchMedia("(max-width: 600px)").matches;
  const size = narrow ? { small: "phone", lead: "small", large: "small" }[wanted] : wanted;
  const [width, height, about] = SIZES[size];
  const head = h("figcaption", {}, h("b", {}, h("bdi", {}, options.caption)), options.help && h("small", {}, options.help));
  const thinned = series.map(({ name, points, dots }) => ({ name, points: thin(points), dots: dots ?? options.dots }));
  const known = thinned.flatMap(({ points }) => points.filter(([, value]) => typeof value === "number"));
  if (!known.length) return h("figure", { class: "chart" }, head, h("p", { class: "quiet" }, "No value."));
  const whole = COUNTED.has(options.axis);
  const right = Math.max(...known.map(([at]) => at), options.end ?? 0, whole ? 1 : 1e-9);
  const levels = options.levels ?? [];
  const [low, high] = range([...levels.map(([value]) => value), ...known.flatMap((point) => (hasBand(point) ? point.slice(1) : [point[1]]))]);
  const x = (value) => LEFT + (value / right) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - BOTTOM - TOP);
  const across = ticks(low, high, about + 1);
  const grid = across.found.flatMap((tick) => [
    h("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }),
    h("text", { x: LEFT - 5, y: y(tick) + 3.5, class: "tick end" }, tickLabel(tick, across.gap)),
  ]);
  const along = ticks(0, right, about + 1, whole);
  const bottom = along.found.map((tick) => h("text", { x: x(tick), y: height - 6, class: "tick middle" }, tickLabel(tick, along.gap)));
  const marks = (options.marks ?? []).filter(([at]) => at <= right).map(([at, words]) =>
    h("g", { class: "mark" }, h("line", { x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }), svgTitle(words)));
  const phases = (options.phases ?? []).map(([at, words]) => h("g", { class: "mark phase" },
    at > 0 && h("line", { x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }), h("text", { x: x(at) + 4, y: height - BOTTOM - 5, class: "tick" }, words)));
  const rules = levels.map(([value, words]) => h("g", { class: "mark level" }, h("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
    h("text", { x: LEFT + 4, y: y(value) - 4, class: "tick" }, `${words} ${number(value)}`)));
  const bands = thinned.map(({ points }, index) => [band(points, x, y), index]).filter(([d]) => d)
    .map(([d, index]) => h("path", { d, class: `band series-${index % 6}` }));
  const lines = thinned.flatMap(({ name, points, dots }, index) => {
    const count = series[index].count ?? series[index].points.length;
    const runs = dots ? 1 : Math.max(1, Math.round(((options.smooth ?? 1) * points.length) / Math.max(1, count)));
    const mean = runs > 1 && points.length > runs ? line(smoothed(points, runs), x, y) : "";
    return [
      h("path", { d: line(points, x, y), class: `line series-${index % 6} ${mean ? "raw" : ""}` }, svgTitle(name)),
      mean && h("path", { d: mean, class: `line series-${index % 6}` }, svgTitle(`${name}, mean of ${options.smooth} steps`)),
      ...(dots || points.length === 1 ? points : []).filter(([, value]) => typeof value === "number").map(([at, value]) =>
        h("circle", { cx: x(at), cy: y(value), r: 2.5, class: `dot series-${index % 6}` }, svgTitle(`${name}: ${number(value)} at ${number(at)}`))),
      ...(points.filter(hasBand).length === 1 ? points.filter(hasBand) : []).map(([at, , from, to]) =>
        h("line", { x1: x(at), x2: x(at), y1: y(from), y2: y(to), class: `line series-${index % 6}` })),
    ];
  });
  const latest = series.map(({ name, points }) => `${name} ${number(points.findLast(([, value]) => typeof value === "number")?.[1])}`).join(", ");
  const readout = h("output", { class: `readout quiet ${series.length > 1 ? "several" : ""}` });
  const drawing = h("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${options.caption} over ${options.axis}; last: ${latest}`,
    onclick: wanted === "large" ? null : () => enlarge(series, options),
    onpointermove: (event) => {
      const box = drawing.getBoundingClientRect();
      const at = ((((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT)) * right;
      const nearest = thinned.map(({ name, points }) => [name, points.reduce((best, point) =>
        typeof point[1] === "number" && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) ? point : best, null)]);
      readout.textContent = nearest.filter(([, point]) => point).map(([name, point]) =>
        `${series.length > 1 ? `${name} ` : ""}${number(point[1])}${hasBand(point) ? ` (${number(point[2])} to ${number(point[3])})` : ""} at ${number(point[0])}`).join(" · ");
    },
    onpointerleave: () => { readout.textContent = ""; },
  }, grid, bottom, marks, phases, rules, bands, lines);
  const larger = wanted === "large" ? null : h("button", { type: "button", title: "enlarge this chart", onclick: () => enlarge(series, options) }, "larger");
  head.prepend(exportButtons(drawing, { caption: options.caption, axis: options.axis, names: series.length > 1 ? series.map(({ name }) => name) : [] }, larger));
  return h("figure", { class: "chart" }, head, drawing, readout, series.length > 1 && legend(series.map(({ name }) => name)));
}

function enlarge(series, options) {
  const dialog = h("dialog", { class: "enlarged", "aria-label": options.caption, onclose: () => dialog.remove(),
    onclick: (event) => { if (event.target === dialog) dialog.close(); } });
  fill(dialog, h("form", { method: "dialog" }, h("button", { class: "close", "aria-label": "close" }, "×")), chart(series, options, "large"));
  document.querySelector("main").append(dialog);
  dialog.showModal();
}

function svgTitle(words) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", "title");
  element.textContent = words;
  return element;
}

export function legend(names) {
  return h("ul", { class: "legend" }, names.map((name, index) => h("li", {}, h("i", { class: `series-${index % 6}` }), h("bdi", {}, name))));
}

/** A small line without axes. */
export function sparkline(values) {
  const points = values.map((value, index) => [index, value]);
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const [low, high] = range(known);
  const mean = smoothed(points, Math.max(2, Math.floor(values.length / 10)));
  const d = line(mean, (at) => 1 + (at / (values.length - 1)) * 98, (value) => 21 - ((value - low) / (high - low)) * 20);
  return h("svg", { viewBox: "0 0 100 22", class: "spark", "aria-hidden": "true" }, h("path", { d, class: "line series-0" }));
}
