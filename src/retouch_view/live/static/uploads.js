// Files that a person chooses for a request, and images on canvases. The content security policy allows no blob: addresses.

import { h } from "./dom.js";

export const MOST_BYTES = 25_000_000;

/** A field for one image file. `say` gets sentences for people, and `changed` the file, or null if it was removed. */
export function picker(label, say, changed = () => {}) {
  let content = null;
  const preview = h("canvas", { class: "preview", hidden: true });
  const remove = h("button", { type: "button", class: "button", hidden: true, onclick: () => choose(null) }, `Remove the ${label.toLowerCase()}`);
  const file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp", class: "file", onchange: () => choose(file.files[0] ?? null) });
  const drop = h("label", { class: "drop" }, h("span", {}, `${label}: drop one here, or choose a file (PNG, JPEG, WebP)`), file);

  async function choose(chosen) {
    content = null;
    preview.hidden = remove.hidden = true;
    if (chosen === null) {
      file.value = "";
      changed(null);
      return;
    }
    if (chosen.size > MOST_BYTES) {
      say("The file has more than 25 MB. Make it smaller.");
      return;
    }
    content = await base64(chosen);
    say("");
    remove.hidden = false;
    changed(chosen);
    await draw(preview, chosen).catch(() => say("The browser cannot show this file."));
  }

  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) choose(event.dataTransfer.files[0]);
  });
  return { parts: [drop, preview, remove], content: () => content, clear: () => choose(null) };
}

export async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let binary = "";
  for (let start = 0; start < bytes.length; start += 32768) binary += String.fromCharCode(...bytes.subarray(start, start + 32768));
  return btoa(binary);
}

export function blob(content) {
  return new Blob([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], { type: "image/png" });
}

export async function draw(canvas, file) {
  const bitmap = await createImageBitmap(file);
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  canvas.hidden = false;
}
