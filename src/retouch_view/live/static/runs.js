// The table of all runs: filter, sort, choose runs to compare.

import { ago, duration, fill, h, load, number, path, spent, state, text } from "./dom.js";
import { sparkline } from "./charts.js";

const REFRESH_MS = 3000;
const COLUMNS = [
  ["name", "run", (run) => run.name],
  ["state", "state", (run) => run.state],
  ["step", "step", (run) => run.step],
  ["reward", "reward", (run) => run.reward ?? -Infinity],
  ["gap", "held-out", (run) => run.summary?.gain ?? -Infinity],
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
  const headers = COLUMNS.map(([key, label]) => h("th", { scope: "col" },
    h("button", { class: "sort", onclick: () => { view.reversed = view.sort === key && !view.reversed; view.sort = key; draw(); } }, label)));

  function draw() {
    const order = COLUMNS.find(([key]) => key === view.sort)[2];
    const shown = runs.filter((run) => `${run.name} ${run.state}`.toLowerCase().includes(view.filter));
    shown.sort((one, two) => (order(one) < order(two) ? -1 : order(one) > order(two) ? 1 : 0) * (view.reversed ? -1 : 1));
    headers.forEach((header, index) => header.setAttribute("aria-sort",
      COLUMNS[index][0] !== view.sort ? "none" : view.reversed ? "descending" : "ascending"));
    fill(body, ...shown.map(row));
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
    const summary = run.summary;
    return h("tr", {},
      h("td", {}, h("input", {
        type: "checkbox", "aria-label": `select ${run.name}`, checked: chosen.has(run.name),
        onchange: (event) => { chosen[event.target.checked ? "add" : "delete"](run.name); update(); },
      })),
      h("th", { scope: "row" }, h("a", { href: `#/run/${path(run.name)}` }, text(run.name))),
      h("td", { title: [run.reason, ...run.faults].filter(Boolean).join("; ") }, state(run), run.faults.length ? " · damaged files" : ""),
      h("td", {}, run.steps === null ? run.step : `${run.step} of ${run.steps}`),
      h("td", {}, run.reward === null ? "–" : [sparkline(run.rewards), " ", number(run.reward)]),
      h("td", {}, summary && typeof summary.before === "number" ? `${number(summary.before)} → ${number(summary.after)}` : "–"),
      h("td", {}, duration(run.seconds_left)),
      h("td", { title: "what its judges took" }, spent(run.judges)),
      h("td", {}, ago(run.changed)));
  }

  fill(main,
    h("div", { class: "tools" },
      h("label", {}, "Filter ", h("input", { type: "search", oninput: (event) => { view.filter = event.target.value.toLowerCase(); draw(); } })),
      compare),
    count,
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), headers)), body)));
  update();
  while (!signal.aborted) {
    const found = await load("/api/runs");
    if (signal.aborted) return;
    runs = found.runs;
    if (!body.contains(document.activeElement)) draw();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}
