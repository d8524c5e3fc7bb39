// A prompt or an image of one's own under the untrained and the trained weights, from the same noise.

import { fill, h, load, path, text } from "./dom.js";
import { maskEditor } from "./mask.js";
import { MOST_BYTES, blob, draw, picker } from "./uploads.js";

const STAGES = { loading: "Loading the model", base: "Before training", trained: "After training" };

export async function tryPage(main, signal, name) {
  const { steps, inputs } = await load(`/api/runs/${path(name)}/checkpoints`);
  if (signal.aborted) return;
  if (!steps.length) {
    fill(main, h("h1", {}, "Try ", h("a", { href: `#/run/${path(name)}` }, text(name))), h("p", { class: "quiet" }, "The run has no checkpoint yet."));
    return;
  }
  let job = null;
  const prompt = h("textarea", { rows: 3, maxlength: 10000, required: true, id: "prompt", dir: "auto" });
  const checkpoint = h("select", {}, [...steps].reverse().map((step) => h("option", { value: String(step) }, `step ${step}`)));
  const seed = h("input", { type: "number", min: 0, max: 2147483647, value: 0 });
  const make = h("button", { class: "button", type: "submit" }, "Make both images");
  const cancel = h("button", { class: "button", type: "button", hidden: true, onclick: () => job?.abort() }, "Cancel");
  const status = h("p", { class: "quiet", role: "status" });
  const say = (sentence) => { status.textContent = sentence; };
  const results = h("div", { class: "images pairs" });
  const mask = inputs.mask ? maskEditor(say) : null;
  const source = picker("Source image", say, (chosen) => mask?.show(chosen));
  const reference = inputs.reference ? picker("Reference image", say) : null;
  const context = h("input", { type: "checkbox" });

  /** The images of the request. Throws an Error with a sentence for people. */
  async function images() {
    const found = { image: source.content(), mask: mask && await mask.content(), reference: reference && reference.content() };
    if (mask && !found.image) throw new Error("This model needs a source image.");
    if (mask && !found.mask) throw new Error("This model fills a part of the image. Draw a mask, or choose a file.");
    if (reference && !found.reference) throw new Error("This model needs a reference image.");
    const size = Object.values(found).reduce((sum, each) => sum + (each?.length ?? 0) * 3 / 4, 0); // base64
    if (size > MOST_BYTES + 4) throw new Error("The images have more than 25 MB. Make them smaller.");
    return found;
  }

  async function submit(event) {
    event.preventDefault();
    job = new AbortController();
    const stop = () => job?.abort();
    signal.addEventListener("abort", stop);
    make.disabled = true;
    cancel.hidden = false;
    fill(results);
    status.textContent = "Starting.";
    try {
      const asked = { instruction: prompt.value, ...await images(), context: context.checked ? "reference" : null, step: Number(checkpoint.value), seed: seed.valueAsNumber };
      for await (const found of lines(`/api/runs/${path(name)}/try`, asked, job.signal)) {
        if (found.error) throw new Error(found.error);
        if (found.stage) status.textContent = `${STAGES[found.stage] ?? found.stage}${found.calls ? `: ${found.calls} calls of the model` : ""}.`;
        if (found.done) await show(found.done);
      }
    } catch (error) {
      status.textContent = job.signal.aborted ? "Cancelled." : error.message;
    }
    signal.removeEventListener("abort", stop);
    make.disabled = false;
    cancel.hidden = true;
  }

  async function show(done) {
    const figures = [["source", done.source && { image: done.source }], ["before training", done.base], [`after step ${done.step}`, done.trained]];
    fill(results, await Promise.all(figures.filter(([, made]) => made).map(async ([label, made]) => {
      const canvas = h("canvas", { role: "img", "aria-label": label });
      await draw(canvas, blob(made.image));
      return h("figure", {}, canvas, h("figcaption", {}, label, made.fell_back ? " (from the prompt itself: the completion gave no image)" : ""),
        made.text && h("pre", { dir: "auto" }, made.text));
    })));
    status.textContent = `Both from the noise of seed ${done.seed}.`;
  }

  fill(main, h("h1", {}, "Try ", h("a", { href: `#/run/${path(name)}` }, text(name))),
    h("form", { class: "try", onsubmit: submit },
      h("label", { for: "prompt" }, "Prompt or instruction"), prompt, source.parts, mask?.element, reference?.parts,
      inputs.context && h("label", {}, context, " Show the reference above the image, as context"),
      h("div", { class: "tools" }, h("label", {}, "Checkpoint ", checkpoint), h("label", {}, "Seed ", seed), make, cancel)),
    status, results);
}

/** The lines of JSON of a reply, as they come. */
async function* lines(address, value, signal) {
  const reply = await fetch(address, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value), signal });
  if (!reply.ok) throw new Error((await reply.json().catch(() => ({}))).error ?? `The server replied ${reply.status}.`);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  for (;;) {
    const { done, value: chunk } = await reader.read();
    if (done) return;
    if (!chunk.includes("\n")) {
      parts.push(chunk);
      continue;
    }
    const complete = (parts.join("") + chunk).split("\n");
    parts = [complete.pop()];
    for (const line of complete) if (line.trim()) yield JSON.parse(line);
  }
}
