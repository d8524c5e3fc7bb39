// Two or more runs: differences on the same held-out tasks, their images, curves on one axis, and what differs in the recipes.

import { fill, h, load, path, score, text, thumbnail } from "./dom.js";
import { chart, legend } from "./charts.js";
import { AXES, evaluationColumns, evaluationPoints, placed, rewardPoints } from "./curves.js";

const TASKS = 24;

export async function comparePage(main, signal, names) {
  const runs = await Promise.all(names.map((name) => load(`/api/runs/${path(name)}`)));
  const samples = await Promise.all(runs.map((run) => load(
    `/api/runs/${path(run.name)}/samples?${new URLSearchParams({ set: "heldout", step: run.sample_steps.at(-1) ?? "", limit: TASKS })}`)));
  const compared = await load(`/api/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
  if (signal.aborted) return;
  const charts = h("div", { class: "charts" });
  const columns = [...new Set(runs.flatMap(evaluationColumns))];
  const smooth = Math.max(5, Math.floor(Math.max(...runs.map((run) => run.metrics.length)) / 20));
  function draw(axis) {
    const { label, place } = AXES[axis];
    const series = (points) => runs.map((run) => ({ name: run.name, points: placed(points(run), place(run)) }));
    fill(charts, chart(series(rewardPoints), { caption: "reward/mean", axis: label, smooth, help: `the strong lines are means of ${smooth} steps` }),
      columns.map((column) => chart(series((run) => evaluationPoints(run, column)), { caption: `held-out ${column}`, axis: label, dots: true })));
  }
  const missing = Object.entries(AXES).map(([axis, { missing: why }]) => [axis, runs.find((run) => why(run)), why]).filter(([, run]) => run);
  const reasons = Map.groupBy(missing, ([, run, why]) => `${run.name} ${why(run)}`);
  fill(main,
    h("h1", {}, "Comparison"), paired(compared), tasks(runs, samples),
    h("h2", {}, "Curves"), legend(runs.map((run) => run.name)),
    h("div", { class: "tools" }, h("label", {}, "Over ", h("select", { onchange: (event) => draw(event.target.value) },
      Object.entries(AXES).map(([value, { label }]) => h("option", { value, disabled: missing.some(([axis]) => axis === value) }, label))))),
    h("p", { class: "quiet" }, "Bands are 95 % intervals over the tasks of an evaluation.",
      [...reasons.values()].map((found) => [` Not over ${found.map(([axis]) => AXES[axis].label).join(" or ")}: `, text(found[0][1].name), ` ${found[0][2](found[0][1])}.`])),
    charts, differences(runs));
  draw("step");
}

function flat(value, prefix = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [key, item] of Object.entries(value)) flat(item, prefix ? `${prefix}.${key}` : key, found);
  } else found[prefix] = JSON.stringify(value);
  return found;
}

function differences(runs) {
  const flats = runs.map((run) => flat(run.recipe));
  const keys = [...new Set(flats.flatMap(Object.keys))].filter((key) => key !== "name" && new Set(flats.map((each) => each[key])).size > 1).sort();
  return h("section", {}, h("h2", {}, "What differs in the recipes"),
    keys.length === 0 ? h("p", { class: "quiet" }, "Nothing but the name.")
      : h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", ...runs.map((run) => run.name)].map((name) => h("th", { scope: "col" }, text(name))))),
        h("tbody", {}, keys.map((key) => h("tr", {}, h("th", { scope: "row" }, text(key)), flats.map((each) => h("td", {}, text(each[key] ?? "–")))))))));
}

function signed(value) {
  return value > 0 ? `+${score(value)}` : score(value);
}

/** The paired differences to the first run. */
function paired({ column, first, rows, error }) {
  if (error) return h("p", { class: "quiet" }, error);
  return h("section", {}, h("h2", {}, "Difference to ", text(first)),
    h("p", { class: "quiet" }, `Mean ${column} of each run's last evaluation, over the tasks that both evaluated. The interval contains the spread between tasks, not between seeds.`),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["", "tasks", first, "this run", "difference", "95 % interval"].map((name) => h("th", { scope: "col" }, text(name))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, text(row.run)), h("td", {}, row.n), h("td", {}, score(row.before)), h("td", {}, score(row.after)),
        h("td", { class: row.direction }, signed(row.difference)), h("td", {}, row.interval ? row.interval.map((end) => signed(end)).join(" to ") : "none: fewer than 8 tasks")))))));
}

/** The tasks of which all runs stored an image, those that the last run improved most first. */
function tasks(runs, samples) {
  const found = samples.map((each) => new Map(each.samples.map((line) => [line.task, line])));
  const gain = (task) => (found.at(-1).get(task).reward ?? 0) - (found[0].get(task).reward ?? 0);
  const shared = [...found[0].keys()].filter((task) => found.every((each) => each.has(task))).sort((one, two) => gain(two) - gain(one));
  return h("section", {}, h("h2", {}, "The same held-out tasks"),
    shared.length === 0 ? h("p", { class: "quiet" }, "These runs stored no images of the same held-out tasks.")
      : shared.map((task) => h("article", { class: "compared" }, h("p", {}, text(found[0].get(task).instruction), h("small", {}, `difference ${signed(gain(task))}`)), h("div", { class: "strip" },
        found[0].get(task).source && figure(runs[0], found[0].get(task), found[0].get(task).source, "source"),
        found.map((each, index) => figure(runs[index], each.get(task), each.get(task).image, `${runs[index].name}: ${score(each.get(task).reward)}`))))));
}

function figure(run, line, file, words) {
  return h("figure", {}, file ? thumbnail(run.name, line.step, file, words, 200) : h("span", { class: "noimage" }, "no image"), h("figcaption", {}, text(words)));
}
