// Line charts as SVG. A series is { name, points: [[x, y], ...] }; y may be null.

import { h, number } from "./dom.js";

const WIDTH = 340;
const HEIGHT = 170;
const LEFT = 46;
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
    if (part.length) found.push([0, 1].map((axis) => part.reduce((sum, point) => sum + point[axis], 0) / part.length));
  }
  return found;
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
  const [low, high] = range(known.map(([, value]) => value));
  const x = (value) => LEFT + ((value - left) / (right - left)) * (WIDTH - LEFT - 8);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const grid = ticks(low, high).flatMap((tick) => [
    h("line", { x1: LEFT, x2: WIDTH - 8, y1: y(tick), y2: y(tick), class: "grid" }),
    h("text", { x: LEFT - 5, y: y(tick) + 3.5, class: "tick end" }, number(tick)),
  ]);
  const bottom = ticks(left, right).map((tick) => h("text", { x: x(tick), y: HEIGHT - 6, class: "tick middle" }, number(tick)));
  const marks = (options.marks ?? []).filter(([at]) => at >= left && at <= right).map(([at, words]) =>
    h("g", { class: "mark" }, h("line", { x1: x(at), x2: x(at), y1: TOP, y2: HEIGHT - BOTTOM }), svgTitle(words)));
  const lines = thinned.flatMap(({ name, points }, index) => [
    h("path", { d: line(points, x, y), class: `line series-${index % 6}` }, svgTitle(name)),
    ...(options.dots || points.length === 1 ? points : []).filter(([, value]) => value !== null).map(([at, value]) =>
      h("circle", { cx: x(at), cy: y(value), r: 2.5, class: `dot series-${index % 6}` }, svgTitle(`${name}: ${number(value)} at ${number(at)}`))),
  ]);
  const latest = series.map(({ name, points }) => `${name} ${number(points.findLast(([, value]) => value !== null)?.[1])}`).join(", ");
  const readout = h("output", { class: "readout quiet" });
  const drawing = h("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${options.caption} over ${options.axis}; last: ${latest}`,
    onpointermove: (event) => {
      const box = drawing.getBoundingClientRect();
      const at = left + ((((event.clientX - box.left) / box.width) * WIDTH - LEFT) / (WIDTH - LEFT - 8)) * (right - left);
      const nearest = thinned.map(({ name, points }) => [name, points.reduce((best, point) =>
        point[1] !== null && (best === null || Math.abs(point[0] - at) < Math.abs(best[0] - at)) ? point : best, null)]);
      readout.textContent = nearest.filter(([, point]) => point).map(([name, point]) =>
        `${series.length > 1 ? `${name} ` : ""}${number(point[1])} at ${number(point[0])}`).join(" · ");
    },
    onpointerleave: () => { readout.textContent = ""; },
  }, grid, bottom, marks, lines);
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
