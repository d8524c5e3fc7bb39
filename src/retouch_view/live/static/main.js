// Chooses the page by the part of the address after "#".

import { fill, h, text } from "./dom.js";
import { comparePage } from "./compare.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { samplesPage } from "./samples.js";
import { savePage } from "./save.js";
import { tryPage } from "./try.js";
import { votePage } from "./vote.js";
import { voteResultsPage } from "./vote-results.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
let current = new AbortController();

async function show() {
  current.abort();
  current = new AbortController();
  const { signal } = current;
  const [kind, name] = location.hash.replace(/^#\/?/, "").split("/");
  const names = (name ?? "").split(",").map((part) => decodeURIComponent(part));
  const named = (kind === "vote" ? names.slice(0, 1) : names).join(", ");
  fill(crumbs, h("a", { href: "#/" }, "Retouch runs"), ...(kind ? [" / ", text(named)] : []),
    h("button", { class: "save", type: "button", onclick: savePage, title: "one file with the images, which needs no server" }, "Save this page"));
  document.title = kind ? `${named} · Retouch` : "Retouch";
  fill(main, h("p", { class: "quiet" }, "Loading."));
  try {
    if (kind === "run") await runPage(main, signal, names[0]);
    else if (kind === "samples") await samplesPage(main, signal, names[0]);
    else if (kind === "try") await tryPage(main, signal, names[0]);
    else if (kind === "vote") await votePage(main, signal, names);
    else if (kind === "votes") await voteResultsPage(main, signal, names[0]);
    else if (kind === "compare") await comparePage(main, signal, names);
    else await runsPage(main, signal);
  } catch (error) {
    if (!signal.aborted) fill(main, h("p", { class: "warning", role: "alert" }, error.message), h("p", {}, h("a", { href: "#/" }, "All runs")));
  }
}

// A small image is enlarged with sharp edges, a photograph is not.
document.addEventListener("load", ({ target }) => {
  if (Math.max(target.naturalWidth, target.naturalHeight) <= 96) target.classList.add("pixelated");
}, true);
window.addEventListener("hashchange", show);
show();
