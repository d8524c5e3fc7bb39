// One run: live curves, evaluations, benchmarks, checks, alarms, recipe.

import { duration, features, fill, h, load, number, path, spent, state, text } from "./dom.js";
import { chart } from "./charts.js";
import { controls, requests } from "./control.js";
import { evaluationPoints, rewardPoints } from "./curves.js";

const FIRST = ["reward/mean", "reward/std", "group/zero_std_fraction", "policy/loss", "policy/grad_norm", "policy/clip_fraction"];
const HELP = {
  "reward/mean": "mean over the step's samples, with its 95 % interval",
  "reward/ci95": "half of the width of the mean's 95 % interval; groups are clusters",
  "reward/std": "spread over the step's samples",
  "group/zero_std_fraction": "groups whose samples all scored the same: they teach nothing",
  "policy/grad_norm": "before clipping",
  "policy/clip_fraction": "actions whose ratio was clipped",
  "policy/ratio_max_first": "should be 0 before the first update of a step",
  "judge/cost": "dollars so far, of the requests whose price is known",
  "judge/requests": "requests to judges so far, retries included",
  "judge/input_tokens": "tokens that judges read so far",
  "judge/output_tokens": "tokens that judges wrote so far",
  "judge/unpriced_requests": "requests so far whose price is not known",
};

const ALARM = "watch/alarm/";

export async function runPage(main, signal, name) {
  const run = await load(`/api/runs/${path(name)}`);
  if (signal.aborted) return;
  const head = h("div");
  const charts = h("div", { class: "charts" });
  const more = h("details", {}, h("summary", {}, "All metrics"), h("div", { class: "charts" }));
  const times = h("div", { class: "charts" });
  const results = h("div");
  const allowed = await features();
  const control = allowed.control ? controls(run) : null;
  if (signal.aborted) return;
  const asked = h("div");
  fill(main, head, alarm(run), control?.element, charts, results, asked, more, h("section", {}, h("h2", {}, "Time, memory and judges"), times),
    checks(run), recipe(run));

  function draw() {
    fill(head, header(run, allowed));
    control?.show(run);
    if (main.querySelector(".export :focus-visible")) return; // a new chart would take the keyboard's place away
    fill(results, alarms(run), benchmarks(run), evaluations(run));
    fill(asked, requests(run));
    const names = [...new Set(run.metrics.flatMap((line) => Object.keys(line)))].filter((key) => key.includes("/")).sort();
    const marks = raised(run);
    const points = (key, lines) => (key === "reward/mean" ? rewardPoints(run) : lines.filter((line) => key in line).map((line) => [line.step, line[key]]));
    const draws = (keys, lines) => keys.map((key) => chart([{ name: key, points: points(key, lines) }], { caption: key, help: HELP[key], axis: "steps", marks }));
    const [reward, ...others] = draws(FIRST.filter((key) => names.includes(key)), run.metrics);
    fill(charts, reward, ...suiteCharts(run, marks), ...others);
    if (more.open) fill(more.lastChild, ...draws(names.filter((key) => !FIRST.includes(key) && !key.startsWith("suite/")), run.metrics));
    const taken = [...new Set(run.timings.flatMap((line) => Object.keys(line)))].filter((key) => key.includes("/"));
    fill(times, ...["time/", "memory/", "judge/"].flatMap((kind) => draws(taken.filter((key) => key.startsWith(kind)).sort(), run.timings)));
    if (!run.metrics.length) fill(charts, h("p", { class: "quiet" }, run.reason ?? "The run has made no step yet."));
  }
  more.addEventListener("toggle", draw);
  draw();
  follow(run, signal, draw);
}

/** Appends the lines that the trainer writes, as they come. */
function follow(run, signal, draw) {
  const address = `/api/runs/${path(run.name)}/events?generation=${run.generation}&metrics=${run.metrics.length}&timings=${run.timings.length}`;
  const source = new EventSource(address);
  signal.addEventListener("abort", () => source.close());
  source.addEventListener("error", () => {
    source.close();
    if (!signal.aborted) setTimeout(() => !signal.aborted && follow(run, signal, draw), 3000);
  });
  source.addEventListener("message", (event) => {
    const found = JSON.parse(event.data);
    if (!isNews(run, found)) return; // as the first message often is: a redraw would take away what the pointer reads
    if (found.generation !== run.generation) [run.metrics, run.timings, run.generation] = [[], [], found.generation];
    run.metrics.push(...found.metrics);
    run.timings.push(...found.timings);
    Object.assign(run, found.run);
    requestAnimationFrame(draw);
  });
}

function isNews(run, found) {
  return found.generation !== run.generation || found.metrics.length > 0 || found.timings.length > 0
    || Object.entries(found.run).some(([key, value]) => JSON.stringify(value) !== JSON.stringify(run[key]));
}

function header(run, allowed) {
  const facts = [
    ["step", run.steps === null ? run.step : `${run.step} of ${run.steps}`],
    ["phase", run.phase ?? "–"],
    ["reward", number(run.reward)],
    ["per step", run.seconds_per_step === null ? "–" : `${number(run.seconds_per_step)} s`],
    ["time left", duration(run.seconds_left)],
    ...(run.judges ? [["judges so far", spent(run.judges)]] : []),
  ];
  const faults = run.faults.filter((each) => each !== run.reason);
  return h("div", {},
    h("h1", {}, text(run.name), " ", state(run)),
    run.reason && h("p", { class: "reason" }, text(run.reason)),
    faults.length > 0 && h("p", { class: "warning" }, "Damage in its files: ", text(faults.join("; ")), "."),
    run.steps ? h("progress", { max: run.steps, value: run.step, "aria-label": "steps" }) : null,
    h("dl", { class: "facts" }, facts.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, value)))),
    h("p", { class: "tools" },
      run.sample_steps.length > 0 && h("a", { class: "button", href: `#/samples/${path(run.name)}` }, "Samples"),
      allowed.vote !== undefined && h("a", { class: "button", href: `#/votes/${path(run.name)}` }, "Votes"),
      allowed.try && h("a", { class: "button", href: `#/try/${path(run.name)}` }, "Try it")));
}

function alarm(run) {
  if (!run.alarm) return null;
  return h("div", { class: "warning", role: "alert" }, `A rule stopped the run at step ${run.alarm.step}. `,
    (run.alarm.alarms ?? []).map((each) => h("p", {}, text(each.text ?? each.rule ?? ""))));
}

/** The alarms of all rules so far: [[step, what was noticed], ...]. */
function raised(run) {
  const stopped = (run.alarm?.alarms ?? []).map((each) => [run.alarm.step, each.text ?? each.rule ?? "alarm"]);
  const suites = run.suites.filter((line) => typeof line.alarm === "string").map((line) => [line.step, line.alarm]);
  const rules = run.metrics.flatMap((line) => Object.keys(line).filter((key) => key.startsWith(ALARM) && !key.startsWith(`${ALARM}suite `))
    .map((key) => [line.step, key.slice(ALARM.length)]));
  const inSuites = (each) => suites.some(([step, words]) => step === each[0] && words === each[1]);
  return [...suites, ...stopped.filter((each) => !inSuites(each)), ...rules];
}

function alarms(run) {
  const found = raised(run);
  if (!found.length) return null;
  return h("section", {}, h("h2", {}, "Alarms"),
    h("ul", { class: "warning" }, found.map(([step, words]) => h("li", {}, `after step ${step}: `, text(words)))));
}

function suiteNames(run) {
  return [...new Set(run.suites.map((line) => line.suite))];
}

/** The headline of each benchmark over the steps, for the place beside the reward. */
function suiteCharts(run, marks) {
  return suiteNames(run).map((name) => {
    const lines = run.suites.filter((line) => line.suite === name);
    const cells = lines.map((line) => [line.step, line.table.all?.[line.headline]]);
    return chart([{ name, points: cells.map(([step, cell]) => [step, cell?.mean ?? null, cell?.low, cell?.high]) }],
      { caption: `benchmark ${name}`, help: lines.at(-1).headline, axis: "steps", marks, dots: true });
  });
}

function benchmarks(run) {
  if (!run.suites.length) return null;
  const tables = suiteNames(run).map((name) => {
    const lines = run.suites.filter((line) => line.suite === name);
    const last = lines.at(-1);
    const columns = Object.keys(last.table.all ?? {});
    const cell = (found) => h("td", { title: found?.low == null ? null : `95 % interval ${number(found.low)} to ${number(found.high)}` },
      number(found?.mean ?? null));
    const rows = Object.entries(last.table).map(([label, row]) => h("tr", {}, h("th", { scope: "row" }, text(label)),
      h("td", {}, Math.max(0, ...Object.values(row).map((each) => each?.n ?? 0))), columns.map((column) => cell(row[column]))));
    const missing = last.missing > 0 ? `, ${last.missing} images without a score` : "";
    return h("div", { class: "scroll" }, h("table", {}, h("caption", {}, text(name), ` after step ${last.step}${missing}`),
      h("thead", {}, h("tr", {}, ["", "n", ...columns].map((each) => h("th", { scope: "col" }, text(each))))), h("tbody", {}, rows)));
  });
  return h("section", {}, h("h2", {}, "Benchmarks"), tables);
}

function evaluations(run) {
  if (!run.evals.length) return null;
  const columns = [...new Set(run.evals.flatMap((line) => Object.keys(line.table?.all ?? {})))].filter((name) => name !== "n");
  const last = run.evals.at(-1);
  const drawn = columns.slice(0, 6).map((column) => chart(
    [{ name: column, points: evaluationPoints(run, column) }],
    { caption: column, axis: "steps", dots: true }));
  const rows = Object.entries(last.table ?? {}).map(([label, row]) => h("tr", {}, h("th", { scope: "row" }, text(label)), h("td", {}, row.n ?? "–"),
    columns.map((column) => h("td", { title: interval(last.ci95?.[label]?.[column]) }, number(row[column])))));
  return h("section", {}, h("h2", {}, `Evaluation on ${last.split === "train" ? "trained-on" : "held-out"} tasks`), h("div", { class: "charts" }, drawn),
    h("div", { class: "scroll" }, h("table", {}, h("caption", {}, `After step ${last.step}`),
      h("thead", {}, h("tr", {}, ["", "n", ...columns].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))));
}

function interval(found) {
  return Array.isArray(found) ? `95 % interval ${number(found[0])} to ${number(found[1])}` : null;
}

function checks(run) {
  if (!run.preflight.length) return null;
  return h("section", {}, h("h2", {}, "Checks before the first step"),
    h("ul", {}, run.preflight.map((check) => h("li", {}, h("b", {}, check.ok ? "ok " : "failed "), text(check.text ?? check.name ?? "")))));
}

function recipe(run) {
  return h("details", {}, h("summary", {}, "Recipe"), h("pre", {}, JSON.stringify(run.recipe, null, 2)));
}
