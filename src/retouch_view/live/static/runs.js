// The table of all runs: filter, sort, choose runs to compare.

import { ago, duration, fill, h, load, number, path, score, spent, state, text, thumbnail } from "./dom.js";
import { sparkline } from "./charts.js";

const REFRESH_MS = 3000;
const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["state", "state", (run) => run.state],
  ["step", "step", (run) => run.step],
  ["reward", "reward", (run) => run.reward ?? -Infinity],
  ["gap", "held-out", (run) => (run.verdict ? run.verdict.after - run.verdict.before : -Infinity)],
  ["left", "time left", (run) => run.seconds_left ?? Infinity],
  ["cost", "cost so far", (run) => (run.judges ? (run.judges.cost ?? 0) + run.judges.requests / 1e9 : -1)],
  ["changed", "last change", (run) => -(run.changed ?? 0)],
];

export async function runsPage(main, signal) {
  const chosen = new Set();
  const view = { sort: "changed", reversed: false, filter: "" };
  let runs = [];
  const body = h("tbody");
  const compare = h("a", { class: "button", "aria-disabled": "true" }, "Compare");
  const count = h("p", { class: "quiet", role: "status" });
  const table = h("table", { class: "runs" });
  const headers = COLUMNS.map(([key, label]) => h("th", { scope: "col", class: ["left", "cost"].includes(key) ? key : null },
    h("button", { class: "sort", onclick: () => { view.reversed = view.sort === key && !view.reversed; view.sort = key; draw(); } }, label)));

  function draw() {
    const order = COLUMNS.find(([key]) => key === view.sort)[2];
    const shown = runs.filter((run) => [run.name, run.state, ...Object.values(run.about)].join(" ").toLowerCase().includes(view.filter));
    shown.sort((one, two) => (order(one) < order(two) ? -1 : order(one) > order(two) ? 1 : 0) * (view.reversed ? -1 : 1));
    headers.forEach((header, index) => header.setAttribute("aria-sort",
      COLUMNS[index][0] !== view.sort ? "none" : view.reversed ? "descending" : "ascending"));
    fill(body, ...shown.map(row));
    table.classList.toggle("no-cost", runs.every((run) => !run.judges));
    table.classList.toggle("no-left", runs.every((run) => run.state !== "running"));
    count.textContent = runs.length === 0
      ? "No runs here yet. Start one with: retouch train quickstart"
      : `${shown.length} of ${runs.length} runs`;
    update();
  }

  function update() {
    compare.setAttribute("aria-disabled", String(chosen.size < 2));
    if (chosen.size >= 2) compare.setAttribute("href", `#/compare/${[...chosen].map(encodeURIComponent).join(",")}`);
    else compare.removeAttribute("href");
    compare.textContent = chosen.size < 2 ? "Select two runs to compare" : `Compare ${chosen.size} runs`;
  }

  function row(run) {
    const found = run.verdict;
    const cell = (label, attributes, ...content) => h("td", { "data-label": label, ...attributes }, ...content);
    const words = ["model", "algorithm", "reward"].map((name) => run.about[name]).filter(Boolean).join(" · ");
    return h("tr", {},
      h("td", { class: "choose" }, h("input", {
        type: "checkbox", "aria-label": `select ${run.name}`, checked: chosen.has(run.name),
        onchange: (event) => { chosen[event.target.checked ? "add" : "delete"](run.name); update(); },
      })),
      h("th", { scope: "row" }, h("div", { class: "named" }, run.image ? thumbnail(run.name, ...run.image, "", 44) : h("span", { class: "noimage" }),
        h("div", {}, h("a", { href: `#/run/${path(run.name)}` }, text(run.name)), words && h("small", {}, text(words))))),
      cell("state", { title: [run.reason, ...run.faults].filter(Boolean).join("; ") }, state(run), run.faults.length ? " · damaged files" : "",
        run.state === "failed" && run.reason && h("small", { class: "bad why" }, text(run.reason))),
      cell("step", {}, run.steps === null ? run.step : `${run.step} of ${run.steps}`),
      cell("reward", {}, run.reward === null ? "–" : [sparkline(run.rewards), " ", number(run.reward)]),
      cell("held-out", {}, found ? [h("span", { class: found.direction }, `${score(found.before)} → ${score(found.after)}`), h("small", {}, text(`${found.column}, ${found.on}`))] : "–"),
      cell("time left", { class: "left" }, duration(run.seconds_left)),
      cell("cost so far", { class: "cost", title: "what its judges took" }, spent(run.judges)),
      cell("last change", {}, ago(run.changed)));
  }

  fill(main,
    h("div", { class: "tools" },
      h("label", {}, "Filter ", h("input", { type: "search", oninput: (event) => { view.filter = event.target.value.toLowerCase(); draw(); } })),
      compare),
    count,
    h("div", { class: "scroll" }, table));
  fill(table, h("thead", {}, h("tr", {}, h("th", {}, ""), headers)), body);
  update();
  while (!signal.aborted) {
    const found = await load("/api/runs");
    if (signal.aborted) return;
    runs = found.runs;
    if (!body.contains(document.activeElement)) draw();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}
