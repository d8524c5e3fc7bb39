// The mask of an image, drawn on it with rectangles and a brush, or chosen as a file. White is what should change.

import { h } from "./dom.js";
import { base64, draw, picker } from "./uploads.js";

/** The fields of a mask. `show(file)` sets the image under the drawing, or null; `content()` is a PNG in base64, or null. */
export function maskEditor(say) {
  let shapes = [];
  const image = h("canvas", {});
  const drawing = h("canvas", { class: "drawing", role: "img", "aria-label": "the drawn mask" });
  const board = h("div", { class: "board", hidden: true }, image, drawing);
  const hint = h("p", { class: "quiet" }, "Choose a source image, then draw on it what should change.");
  const tool = h("select", {}, h("option", { value: "rectangle" }, "rectangles"), h("option", { value: "brush" }, "a brush"));
  const width = h("input", { type: "range", min: 1, max: 40, value: 10 });
  const undo = h("button", { type: "button", class: "button", onclick: () => { shapes.pop(); redraw(); } }, "Undo");
  const clear = h("button", { type: "button", class: "button", onclick: () => { shapes = []; redraw(); } }, "Clear the drawing");
  const tools = h("div", { class: "tools", hidden: true }, h("label", {}, "Draw with ", tool), h("label", {}, "Brush size ", width), undo, clear);
  const upload = picker("Mask", say, (chosen) => {
    if (chosen === null) return;
    shapes = [];
    redraw();
  });

  /** A point of the image, in its pixels. */
  function place(event) {
    const box = drawing.getBoundingClientRect();
    return [(event.clientX - box.left) * drawing.width / box.width, (event.clientY - box.top) * drawing.height / box.height];
  }

  function redraw() {
    const context = drawing.getContext("2d");
    context.clearRect(0, 0, drawing.width, drawing.height);
    context.fillStyle = context.strokeStyle = "#f00";
    context.lineCap = context.lineJoin = "round";
    for (const { kind, points, size } of shapes) {
      const [first, last] = [points[0], points.at(-1)];
      if (kind === "rectangle") {
        const [left, top, right, bottom] = [Math.min(first[0], last[0]), Math.min(first[1], last[1]), Math.max(first[0], last[0]), Math.max(first[1], last[1])].map(Math.round);
        context.fillRect(left, top, right - left, bottom - top);
      } else {
        context.lineWidth = size;
        context.beginPath();
        context.moveTo(...first);
        for (const point of points) context.lineTo(...point);
        context.stroke();
      }
    }
  }

  drawing.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    event.preventDefault();
    drawing.setPointerCapture(event.pointerId);
    if (upload.content() !== null) upload.clear();
    const size = Math.max(drawing.width, drawing.height) * Number(width.value) / 100;
    shapes.push({ kind: tool.value, points: [place(event)], size });
    redraw();
  });
  drawing.addEventListener("pointermove", (event) => {
    if (!drawing.hasPointerCapture(event.pointerId)) return;
    shapes.at(-1).points.push(place(event));
    redraw();
  });

  async function show(file) {
    shapes = [];
    board.hidden = tools.hidden = true;
    hint.hidden = false;
    if (file === null) return;
    try {
      await draw(image, file);
    } catch {
      return; // the field of the image says why
    }
    drawing.width = image.width;
    drawing.height = image.height;
    board.hidden = tools.hidden = false;
    hint.hidden = true;
  }

  /** The drawing as a black and white image; null if nothing was drawn. */
  async function drawn() {
    if (!shapes.length) return null;
    const pixels = drawing.getContext("2d").getImageData(0, 0, drawing.width, drawing.height);
    let any = false;
    for (let at = 0; at < pixels.data.length; at += 4) {
      const inside = pixels.data[at + 3] > 127;
      any ||= inside;
      pixels.data.fill(inside ? 255 : 0, at, at + 3);
      pixels.data[at + 3] = 255;
    }
    if (!any) return null;
    const mask = h("canvas", { width: drawing.width, height: drawing.height });
    mask.getContext("2d").putImageData(pixels, 0, 0);
    return base64(await new Promise((resolve) => mask.toBlob(resolve, "image/png")));
  }

  const element = h("fieldset", { class: "mask" }, h("legend", {}, "Mask: what should change, drawn in red or white in a file"),
    hint, board, tools, upload.parts);
  return { element, show, content: async () => upload.content() ?? await drawn() };
}
