// A prompt or an image of one's own under the untrained and the trained weights, from the same noise.

import { fill, h, load, path, text } from "./dom.js";

const MOST_BYTES = 25_000_000;
const STAGES = { loading: "Loading the model", base: "Before training", trained: "After training" };

export async function tryPage(main, signal, name) {
  const { steps } = await load(`/api/runs/${path(name)}/checkpoints`);
  if (signal.aborted) return;
  if (!steps.length) {
    fill(main, h("h1", {}, "Try ", h("a", { href: `#/run/${path(name)}` }, text(name))), h("p", { class: "quiet" }, "The run has no checkpoint yet."));
    return;
  }
  let image = null;
  let job = null;
  const prompt = h("textarea", { rows: 3, maxlength: 10000, required: true, id: "prompt", dir: "auto" });
  const checkpoint = h("select", {}, [...steps].reverse().map((step) => h("option", { value: String(step) }, `step ${step}`)));
  const seed = h("input", { type: "number", min: 0, max: 2147483647, value: 0 });
  const preview = h("canvas", { class: "preview", hidden: true });
  const remove = h("button", { type: "button", class: "button", hidden: true, onclick: () => choose(null) }, "Remove the image");
  const file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp", class: "file", onchange: () => choose(file.files[0] ?? null) });
  const drop = h("label", { class: "drop" }, h("span", {}, "Source image: drop one here, or choose a file (PNG, JPEG, WebP)"), file);
  const make = h("button", { class: "button", type: "submit" }, "Make both images");
  const cancel = h("button", { class: "button", type: "button", hidden: true, onclick: () => job?.abort() }, "Cancel");
  const status = h("p", { class: "quiet", role: "status" });
  const results = h("div", { class: "images pairs" });

  async function choose(chosen) {
    image = null;
    preview.hidden = remove.hidden = true;
    if (chosen === null) {
      file.value = "";
      return;
    }
    if (chosen.size > MOST_BYTES) {
      status.textContent = "The file has more than 25 MB. Make it smaller.";
      return;
    }
    const bytes = new Uint8Array(await chosen.arrayBuffer());
    let binary = "";
    for (let start = 0; start < bytes.length; start += 32768) binary += String.fromCharCode(...bytes.subarray(start, start + 32768));
    image = btoa(binary);
    status.textContent = "";
    remove.hidden = false;
    await draw(preview, chosen).catch(() => { status.textContent = "The browser cannot show this file."; });
  }

  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) choose(event.dataTransfer.files[0]);
  });

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
      const asked = { instruction: prompt.value, image, step: Number(checkpoint.value), seed: seed.valueAsNumber };
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
      h("label", { for: "prompt" }, "Prompt or instruction"), prompt, drop, preview, remove,
      h("div", { class: "tools" }, h("label", {}, "Checkpoint ", checkpoint), h("label", {}, "Seed ", seed), make, cancel)),
    status, results);
}

function blob(base64) {
  return new Blob([Uint8Array.from(atob(base64), (each) => each.charCodeAt(0))], { type: "image/png" });
}

async function draw(canvas, file) {
  const bitmap = await createImageBitmap(file);
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  canvas.hidden = false;
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
