// Two or more runs: curves on one axis, what differs in their recipes, and the same held-out tasks next to each other.

import { fill, h, load, number, path, text } from "./dom.js";
import { chart, legend } from "./charts.js";
import { AXES, evaluationPoints, placed, rewardPoints } from "./curves.js";

const TASKS = 24;

export async function comparePage(main, signal, names) {
  const runs = await Promise.all(names.map((name) => load(`/api/runs/${path(name)}`)));
  const samples = await Promise.all(runs.map((run) => load(
    `/api/runs/${path(run.name)}/samples?${new URLSearchParams({ set: "heldout", step: run.sample_steps.at(-1) ?? "", limit: TASKS })}`)));
  if (signal.aborted) return;
  const charts = h("div", { class: "charts" });
  const columns = [...new Set(runs.flatMap((run) => run.evals.flatMap((line) => Object.keys(line.table?.all ?? {}))))].filter((column) => column !== "n");
  function draw(axis) {
    const { label, place } = AXES[axis];
    const series = (points) => runs.map((run) => ({ name: run.name, points: placed(points(run), place(run)) }));
    fill(charts, chart(series(rewardPoints), { caption: "reward/mean", axis: label }),
      columns.map((column) => chart(series((run) => evaluationPoints(run, column)), { caption: `held-out ${column}`, axis: label, dots: true })));
  }
  const missing = Object.entries(AXES).map(([axis, { missing: why }]) => [axis, runs.find((run) => why(run)), why]).filter(([, run]) => run);
  const reasons = Map.groupBy(missing, ([, run, why]) => `${run.name} ${why(run)}`);
  fill(main,
    h("h1", {}, "Comparison"), legend(runs.map((run) => run.name)),
    h("div", { class: "tools" }, h("label", {}, "Over ", h("select", { onchange: (event) => draw(event.target.value) },
      Object.entries(AXES).map(([value, { label }]) => h("option", { value, disabled: missing.some(([axis]) => axis === value) }, label))))),
    h("p", { class: "quiet" }, "Bands are 95 % intervals: over the samples of a step, and over the tasks of an evaluation.",
      [...reasons.values()].map((found) => [` Not over ${found.map(([axis]) => AXES[axis].label).join(" or ")}: `, text(found[0][1].name), ` ${found[0][2](found[0][1])}.`])),
    charts, differences(runs), tasks(runs, samples));
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

function tasks(runs, samples) {
  const found = samples.map((each) => new Map(each.samples.map((line) => [line.task, line])));
  const shared = [...found[0].keys()].filter((task) => found.every((each) => each.has(task)));
  return h("section", {}, h("h2", {}, "The same held-out tasks"),
    shared.length === 0 ? h("p", { class: "quiet" }, "These runs stored no images of the same held-out tasks.")
      : shared.map((task) => h("div", { class: "strip" }, h("p", {}, text(found[0].get(task).instruction)),
        found.map((each, index) => sample(runs[index], each.get(task))))));
}

function sample(run, line) {
  return h("figure", {}, line.image ? h("img", { src: `/thumbnails/${path(run.name, line.step, line.image)}`, alt: "", loading: "lazy" }) : null,
    h("figcaption", {}, text(run.name), `: ${number(line.reward)}`));
}
