// Line charts as SVG. A series is { name, points: [[x, y, low, high], ...] }. y may be null; low and high, the ends of a band, may be
// null or left out.

import { h, number } from "./dom.js";
import { exportButtons } from "./export.js";

const WIDTH = 340;
const HEIGHT = 170;
const LEFT = 46;
const RIGHT = 14;
const BOTTOM = 22;
const TOP = 8;
const MOST_POINTS = 400;

/** Round numbers in a range. */
export function ticks(low, high, about = 4) {
  const power = 10 ** Math.floor(Math.log10((high - low) / about));
  const gap = [1, 2, 5, 10].map((factor) => factor * power).find((each) => (high - low) / each <= about) ?? 10 * power;
  const found = [];
  for (let tick = Math.ceil(low / gap - 1e-9); tick * gap <= high + 1e-9 * gap; tick += 1) found.push(tick * gap);
  return found;
}

/** Means of consecutive points, so that at most MOST_POINTS remain. */
export function thin(points) {
  const size = Math.max(1, Math.ceil(points.length / MOST_POINTS));
  if (size === 1) return points;
  const found = [];
  for (let start = 0; start < points.length; start += size) {
    const part = points.slice(start, start + size).filter(([, y]) => y !== null);
    if (part.length) found.push(mean(part));
  }
  return found;
}

/** The band of a mean of m independent points with half-widths h is sqrt(sum h^2) / m, as in report.html. */
function mean(part) {
  const [x, y] = [0, 1].map((axis) => part.reduce((sum, point) => sum + point[axis], 0) / part.length);
  if (!part.every(hasBand)) return [x, y, null, null];
  const half = Math.sqrt(part.reduce((sum, [, , low, high]) => sum + ((high - low) / 2) ** 2, 0)) / part.length;
  return [x, y, y - half, y + half];
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
  const room = (high > low ? high - low : Math.abs(high)) * 0.05;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function line(points, x, y) {
  let drawing = false;
  return points.map(([at, value]) => {
    if (value === null) {
      drawing = false;
      return "";
    }
    const command = `${drawing ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    drawing = true;
    return command;
  }).join("");
}

/** A chart with a caption. options: { caption, help, axis, marks: [[x, text], ...], dots } */
export function chart(series, options) {
  const thinned = series.map(({ name, points }) => ({ name, points: thin(points) }));
  const known = thinned.flatMap(({ points }) => points.filter(([, value]) => value !== null));
  const head = h("figcaption", {}, h("b", {}, h("bdi", {}, options.caption)), options.help && h("small", {}, options.help));
  if (!known.length) return h("figure", { class: "chart" }, head, h("p", { class: "quiet" }, "No value yet."));
  const [first, last] = [Math.min, Math.max].map((end) => end(...known.map(([at]) => at)));
  const [left, right] = last > first ? [first, last] : [first - 1, last + 1];
  const [low, high] = range(known.flatMap((point) => (hasBand(point) ? point.slice(1) : [point[1]])));
  const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const grid = ticks(low, high).flatMap((tick) => [
    h("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick), class: "grid" }),
    h("text", { x: LEFT - 5, y: y(tick) + 3.5, class: "tick end" }, number(tick)),
  ]);
  const bottom = ticks(left, right).map((tick) => h("text", { x: x(tick), y: HEIGHT - 6, class: "tick middle" }, number(tick)));
  const marks = (options.marks ?? []).filter(([at]) => at >= left && at <= right).map(([at, words]) =>
    h("g", { class: "mark" }, h("line", { x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }), svgTitle(words)));
  const bands = thinned.map(({ points }, index) => [band(points, x, y), index]).filter(([d]) => d)
    .map(([d, index]) => h("path", { d, class: `band series-${index % 6}` }));
  const lines = thinned.flatMap(({ name, points }, index) => [
    h("path", { d: line(points, x, y), class: `line series-${index % 6}` }, svgTitle(name)),
    ...(options.dots || points.length === 1 ? points : []).filter(([, value]) => value !== null).map(([at, value]) =>
      h("circle", { cx: x(at), cy: y(value), r: 2.5, class: `dot series-${index % 6}` }, svgTitle(`${name}: ${number(value)} at ${number(at)}`))),
  ]);
  const latest = series.map(({ name, points }) => `${name} ${number(points.findLast(([, value]) => value !== null)?.[1])}`).join(", ");
  const readout = h("output", { class: `readout quiet ${series.length > 1 ? "several" : ""}` });
  const drawing = h("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${options.caption} over ${options.axis}; last: ${latest}`,
    onpointermove: (event) => {
      const box = drawing.getBoundingClientRect();
      const at = left + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * (right - left);
      const nearest = thinned.map(({ name, points }) => [name, points.reduce((best, point) =>
        point[1] !== null && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) ? point : best, null)]);
      readout.textContent = nearest.filter(([, point]) => point).map(([name, point]) =>
        `${series.length > 1 ? `${name} ` : ""}${number(point[1])}${hasBand(point) ? ` (${number(point[2])} to ${number(point[3])})` : ""} at ${number(point[0])}`).join(" · ");
    },
    onpointerleave: () => { readout.textContent = ""; },
  }, grid, bottom, marks, bands, lines);
  head.prepend(exportButtons(drawing, { caption: options.caption, axis: options.axis, names: series.length > 1 ? series.map(({ name }) => name) : [] }));
  return h("figure", { class: "chart" }, head, drawing, readout, series.length > 1 && legend(series.map(({ name }) => name)));
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
  if (known.length < 2) return h("span", { class: "quiet" }, "–");
  const [low, high] = range(known);
  const d = line(points, (at) => 1 + (at / (values.length - 1)) * 98, (value) => 21 - ((value - low) / (high - low)) * 20);
  return h("svg", { viewBox: "0 0 100 22", class: "spark", "aria-hidden": "true" }, h("path", { d, class: "line series-0" }));
}
