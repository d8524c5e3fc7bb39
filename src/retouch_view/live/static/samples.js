// The stored images of a run. Only the rows of the grid that can be seen are in the page.

import { fill, h, load, number, path, score, text } from "./dom.js";
import { details } from "./sample.js";

const PAGE = 100;
const CELL = 184;
const ROW = 236;

export async function samplesPage(main, signal, name) {
  const run = await load(`/api/runs/${path(name)}`);
  if (signal.aborted) return;
  const query = new URLSearchParams({ step: String(run.sample_steps.at(-1) ?? ""), set: "heldout" });
  const pages = new Map();
  let total = 0;
  const grid = h("div", { class: "grid-samples", role: "list" });
  const count = h("p", { class: "quiet", role: "status" });
  const dialog = h("dialog", { "aria-label": "sample" });

  const select = (label, key, options) => h("label", {}, `${label} `, h("select", {
    onchange: (event) => { query.set(key, event.target.value); restart(); },
  }, options.map(([value, words]) => h("option", { value, selected: query.get(key) === value }, words))));

  function restart() {
    pages.clear();
    total = 0;
    grid.style.height = "0";
    fill(grid);
    draw();
  }

  async function page(index) {
    if (!pages.has(index)) {
      pages.set(index, null);
      const asked = query.toString();
      const found = await load(`/api/runs/${path(name)}/samples?${asked}&offset=${index * PAGE}&limit=${PAGE}`);
      if (signal.aborted || asked !== query.toString()) return;
      pages.set(index, found.samples);
      total = found.total;
      count.textContent = total ? `${total} samples` : "No samples match.";
      draw();
    }
  }

  function draw() {
    if (signal.aborted) return;
    const columns = Math.max(1, Math.floor(grid.clientWidth / CELL));
    grid.style.height = `${Math.ceil(total / columns) * ROW}px`;
    const top = Math.max(0, -grid.getBoundingClientRect().top);
    const first = Math.max(0, Math.floor(top / ROW) - 1) * columns;
    const end = Math.min(total, first + (Math.ceil(window.innerHeight / ROW) + 3) * columns);
    const needed = new Set([0]);
    for (let index = first; index < end; index += 1) needed.add(Math.floor(index / PAGE));
    needed.forEach(page);
    const focused = document.activeElement?.dataset?.index;
    const cells = [];
    for (let index = first; index < end; index += 1) {
      const line = pages.get(Math.floor(index / PAGE))?.[index % PAGE];
      if (line) cells.push(cell(line, index, columns));
    }
    fill(grid, ...cells);
    if (focused !== undefined) grid.querySelector(`[data-index="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function cell(line, index, columns) {
    const button = h("button", { class: "sample", role: "listitem", "data-index": index, onclick: () => open(line, index) },
      line.image ? h("img", { src: `/thumbnails/${path(name, line.step, line.image)}`, alt: "", loading: "lazy" }) : h("span", { class: "noimage" }, "no image"),
      h("span", { class: "caption" }, text(line.instruction)),
      h("span", { class: "score" }, `reward ${score(line.reward)}`));
    button.style.transform = `translate(${(index % columns) * CELL}px, ${Math.floor(index / columns) * ROW}px)`;
    return button;
  }

  async function open(line, index) {
    const image = (file) => `/images/${path(name, line.step, file)}`;
    const strip = h("div", { class: "strip" });
    const { written, more } = details(name, line, signal);
    const scores = Object.entries({ reward: line.reward, advantage: line.advantage, ...line.scores });
    fill(dialog,
      h("form", { method: "dialog" }, h("button", { class: "close", "aria-label": "close" }, "×")),
      h("h2", {}, text(line.instruction)),
      h("p", { class: "quiet" }, `step ${line.step}, ${line.set === "heldout" ? "held-out" : "training"}, group ${line.group}, sample ${line.slot}, task `, text(line.task)),
      line.source && line.image ? slider(image(line.source), image(line.image)) : null,
      h("div", { class: "images" }, [["source", line.source], ["result", line.image], ["target", line.target]].filter(([, file]) => file).map(([label, file]) =>
        h("figure", {}, h("img", { src: image(file), alt: label }), h("figcaption", {}, label)))),
      written,
      more, h("h3", {}, "This task over training"), strip,
      h("h3", {}, "Scores"), h("table", {}, h("tbody", {}, scores.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, text(key)), h("td", {}, number(value)))))));
    if (!dialog.open) dialog.showModal();
    dialog.dataset.index = index;
    const found = await load(`/api/runs/${path(name)}/samples?${new URLSearchParams({ task: line.task, set: line.set, limit: 60, sort: "step:asc" })}`);
    fill(strip, ...found.samples.filter((each) => each.image && each.slot === line.slot).map((each) => h("figure", {},
      h("img", { src: `/thumbnails/${path(name, each.step, each.image)}`, alt: `step ${each.step}`, loading: "lazy" }),
      h("figcaption", {}, `step ${each.step}: ${score(each.reward)}`))));
  }

  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.target.matches?.("input")) return;
    const index = Number(dialog.dataset.index) + step;
    const line = pages.get(Math.floor(index / PAGE))?.[index % PAGE];
    if (line) open(line, index);
  });

  const columns = await scoreColumns(name, query.get("step"));
  if (signal.aborted) return;
  fill(main,
    h("h1", {}, "Samples of ", h("a", { href: `#/run/${path(name)}` }, text(name))),
    h("div", { class: "tools" },
      select("Step", "step", [["", "all"], ...run.sample_steps.map((step) => [String(step), String(step)])]),
      select("Set", "set", [["heldout", "held-out"], ["group", "training"], ["", "both"]]),
      select("Sort by", "sort", [["", "stored order"], ...["reward", "advantage", ...columns].flatMap((column) =>
        [[`${column}:desc`, `${column}, highest first`], [`${column}:asc`, `${column}, lowest first`]])]),
      h("label", {}, "Search ", h("input", { type: "search", onchange: (event) => { query.set("search", event.target.value); restart(); } }))),
    count, grid, dialog);
  for (const kind of ["scroll", "resize"]) window.addEventListener(kind, () => requestAnimationFrame(draw), { signal, passive: true });
  draw();
}

async function scoreColumns(name, step) {
  const { samples } = await load(`/api/runs/${path(name)}/samples?limit=1&step=${step}`);
  return Object.keys(samples[0]?.scores ?? {});
}

/** The source under the result, with a slider between them, and their difference. */
function slider(source, result) {
  const above = h("img", { src: result, alt: "result" });
  const cover = h("div", { class: "cover" }, above);
  const stage = h("div", { class: "slider" }, h("img", { src: source, alt: "source" }), cover);
  const set = (share) => stage.style.setProperty("--at", `${share}%`);
  set(50);
  return h("div", {}, stage, h("div", { class: "tools" },
    h("label", {}, "source ", h("input", { type: "range", min: 0, max: 100, value: 50, oninput: (event) => set(event.target.value) }), " result"),
    h("label", {}, h("input", { type: "checkbox", onchange: (event) => stage.classList.toggle("difference", event.target.checked) }), " difference")));
}
