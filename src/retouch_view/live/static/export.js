// Saves a chart for a paper, as SVG or PNG: in light colours, with its caption, its axis and its legend.

import { download, h } from "./dom.js";

const PIXELS = 4; // of the PNG, per unit of the drawing
const LINE = 14;
const MOST_LETTERS = 60;
const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linejoin", "font-size", "text-anchor"];
const FONT = "Helvetica, Arial, sans-serif";

/** The buttons. about: { caption, axis, names }; names: of the series, none for a single one. more: another button. */
export function exportButtons(drawing, about, more = null) {
  const name = about.caption.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 80) || "chart";
  const button = (kind, listener) => h("button", { type: "button", title: `save this chart as ${kind}`, onclick: listener }, kind);
  return h("span", { class: "export" }, more,
    button("SVG", () => download(new Blob([new XMLSerializer().serializeToString(paper(drawing, about))], { type: "image/svg+xml" }), `${name}.svg`)),
    button("PNG", () => painted(paper(drawing, about)).toBlob((blob) => download(blob, `${name}.png`))));
}

/** The drawing as an SVG of its own, whose elements have their styles as attributes. */
function paper(drawing, { caption, axis, names }) {
  const { width, height: inner } = drawing.viewBox.baseVal;
  const axisAt = LINE + inner + LINE - 4;
  const height = axisAt + 6 + names.length * LINE;
  const legend = names.map((name, index) => {
    const y = axisAt + 2 + (index + 1) * LINE;
    return [h("line", { x1: 46, x2: 62, y1: y - 4, y2: y - 4, class: `line series-${index % 6}` }), h("text", { x: 67, y, class: "tick" }, short(name))];
  });
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "font-family": FONT },
    h("rect", { x: 0, y: 0, width, height, class: "ground" }),
    h("text", { x: 46, y: LINE - 3, class: "tick caption" }, short(caption)),
    h("g", { transform: `translate(0 ${LINE})` }, [...drawing.childNodes].map((child) => child.cloneNode(true))),
    h("text", { x: (46 + width - 14) / 2, y: axisAt, class: "tick middle" }, axis), legend);
  const place = h("div", { class: "paper" }, svg);
  document.body.append(place);
  for (const element of svg.querySelectorAll("*")) {
    if (element.tagName === "title") continue;
    const style = getComputedStyle(element);
    for (const each of STYLES) element.setAttribute(each, style.getPropertyValue(each));
  }
  place.remove();
  for (const element of svg.querySelectorAll("[class]")) element.removeAttribute("class");
  return svg;
}

function short(words) {
  const letters = [...words];
  return letters.length > MOST_LETTERS ? `${letters.slice(0, MOST_LETTERS - 1).join("")}…` : words;
}

/** The SVG on a canvas. An image of it would need an exception in the page's content security policy. */
function painted(svg) {
  const { width, height } = svg.viewBox.baseVal;
  const canvas = h("canvas", { width: width * PIXELS, height: height * PIXELS });
  const pen = canvas.getContext("2d");
  pen.scale(PIXELS, PIXELS);
  paint(pen, svg);
  return canvas;
}

function paint(pen, group) {
  for (const element of group.children) {
    if (element.tagName === "g") {
      const [, down] = /translate\(0 (\d+)\)/.exec(element.getAttribute("transform") ?? "") ?? [0, 0];
      pen.save();
      pen.translate(0, Number(down));
      paint(pen, element);
      pen.restore();
    } else if (element.tagName !== "title") paintOne(pen, element);
  }
}

function paintOne(pen, element) {
  const at = (name) => Number.parseFloat(element.getAttribute(name) ?? "0");
  const fill = element.getAttribute("fill");
  const stroke = element.getAttribute("stroke");
  const shape = new Path2D(element.tagName === "path" ? element.getAttribute("d") : undefined);
  if (element.tagName === "line") {
    shape.moveTo(at("x1"), at("y1"));
    shape.lineTo(at("x2"), at("y2"));
  } else if (element.tagName === "circle") shape.arc(at("cx"), at("cy"), at("r"), 0, 2 * Math.PI);
  else if (element.tagName === "rect") shape.rect(at("x"), at("y"), at("width"), at("height"));
  pen.globalAlpha = at("fill-opacity");
  pen.fillStyle = fill;
  if (element.tagName === "text") {
    pen.font = `${at("font-size")}px ${FONT}`;
    pen.textAlign = { middle: "center", end: "right" }[element.getAttribute("text-anchor")] ?? "left";
    pen.fillText(element.textContent, at("x"), at("y"));
    return;
  }
  if (fill !== "none" && element.tagName !== "line") pen.fill(shape);
  if (stroke === "none") return;
  pen.globalAlpha = at("stroke-opacity");
  pen.strokeStyle = stroke;
  pen.lineWidth = at("stroke-width");
  pen.lineJoin = element.getAttribute("stroke-linejoin");
  pen.setLineDash((element.getAttribute("stroke-dasharray").match(/[\d.]+/g) ?? []).map(Number));
  pen.stroke(shape);
}
