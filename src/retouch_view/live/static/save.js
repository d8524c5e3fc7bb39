// Saves the page as it is now: one file with its style and images, which loads nothing and runs no script.

import { download } from "./dom.js";

const POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'";
const STYLE = "the style of the page";
const LEFT_OUT = "form, .tools, .export, .control, .close, dialog:not([open])";

export async function savePage() {
  const main = document.getElementById("main");
  const page = document.implementation.createHTMLDocument(document.title); // it loads nothing
  const copy = page.importNode(main, true);
  const shown = [...main.querySelectorAll("img, canvas")];
  const copies = [...copy.querySelectorAll("img, canvas")];
  await Promise.all(shown.map(async (element, index) => {
    const image = page.createElement("img");
    image.className = element.className;
    image.alt = element.getAttribute("alt") ?? element.getAttribute("aria-label") ?? "";
    image.setAttribute("src", element instanceof HTMLCanvasElement ? element.toDataURL() : await dataOf(element.src));
    copies[index].replaceWith(image);
  }));
  copy.querySelectorAll(LEFT_OUT).forEach((element) => element.remove());
  copy.querySelectorAll("a").forEach((element) => element.removeAttribute("href"));
  const policy = page.createElement("meta");
  policy.setAttribute("http-equiv", "Content-Security-Policy");
  policy.setAttribute("content", POLICY);
  const charset = page.createElement("meta");
  charset.setAttribute("charset", "utf-8");
  page.head.prepend(charset, policy);
  page.head.append(page.createComment(STYLE));
  page.body.append(copy);
  const sheets = [...document.querySelectorAll("link[rel=stylesheet]")].map(async (sheet) => (await fetch(sheet.href)).text());
  const css = (await Promise.all(sheets)).join("\n");
  const whole = new XMLSerializer().serializeToString(page.documentElement);
  const content = `<!doctype html>\n${whole.replace(`<!--${STYLE}-->`, () => `<style>${css}</style>`)}\n`;
  const name = document.title.replace(/[^\p{L}\p{N} ._-]+/gu, "").slice(0, 80) || "page";
  download(new Blob([content], { type: "text/html" }), `${name}.html`);
}

/** An image of this server as a data URL; it stays empty where the image cannot be loaded. */
async function dataOf(address) {
  const reply = await fetch(address).catch(() => null);
  if (!reply?.ok) return "";
  const blob = await reply.blob();
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.readAsDataURL(blob);
  });
}
