// One run: what it trains, its result so far, live curves, held-out tasks over training, evaluations, benchmarks, alarms, recipe.

import { duration, features, fill, h, load, number, path, score, spent, state, text, thumbnail, verdict } from "./dom.js";
import { chart } from "./charts.js";
import { controls, requests } from "./control.js";
import { evaluatedTasks, evaluationColumns, evaluationPoints, headline, rewardPoints } from "./curves.js";

const HELP = {
  "reward/mean": "mean over the step's samples",
  "reward/ci95": "half of the width of the mean's 95 % interval; groups are clusters",
  "reward/std": "spread over the step's samples",
  "group/zero_std_fraction": "groups whose samples all scored the same: they teach nothing",
  "policy/grad_norm": "before clipping",
  "policy/clip_fraction": "actions whose ratio was clipped",
  "policy/ratio_max_first": "should be 0 before the first update of a step",
  "judge/cost": "dollars so far, of the requests whose price is known",
  "judge/requests": "requests to judges so far, retries included",
  "judge/retries": "of these, repeated after an error or an unusable answer",
  "judge/input_tokens": "tokens that judges read so far",
  "judge/output_tokens": "tokens that judges wrote so far",
  "judge/unpriced_requests": "requests so far whose price is not known",
};

const ALARM = "watch/alarm/";
const TASKS = 8;

export async function runPage(main, signal, name) {
  const run = await load(`/api/runs/${path(name)}`);
  if (signal.aborted) return;
  const head = h("div");
  const charts = h("div", { class: "charts lead" });
  const strip = h("section");
  const metrics = h("div", { class: "charts" });
  const times = h("div", { class: "charts" });
  const zero = h("p", { class: "quiet" });
  const more = h("details", {}, h("summary", {}, "All metrics"), metrics, zero, h("h3", {}, "Time, memory and judges"), times);
  const results = h("div");
  const allowed = await features();
  const control = allowed.control ? controls(run) : null;
  if (signal.aborted) return;
  const asked = h("div");
  let smooth = Math.max(5, Math.floor(run.metrics.length / 20));
  const width = h("output", {}, `${smooth} steps`);
  const slider = h("label", {}, "Smoothing ", h("input", {
    type: "range", min: 1, max: Math.max(20, Math.floor(run.metrics.length / 4)), value: smooth,
    oninput: (event) => { smooth = event.target.valueAsNumber; width.textContent = smooth === 1 ? "none" : `${smooth} steps`; requestAnimationFrame(draw); },
  }), " ", width);
  fill(main, head, alarm(run), control?.element, h("div", { class: "tools smoothing" }, slider), charts, strip, results, asked, more, checks(run), recipe(run));

  function draw() {
    fill(head, header(run, allowed));
    control?.show(run);
    if (main.querySelector(".export :focus-visible")) return; // a new chart would take the keyboard's place away
    fill(results, alarms(run), benchmarks(run), evaluations(run));
    fill(asked, requests(run));
    const names = [...new Set(run.metrics.flatMap((line) => Object.keys(line)))].filter((key) => key.includes("/") && isShown(run, key)).sort();
    const marks = raised(run);
    const options = { axis: "steps", marks, smooth, end: run.step };
    const draws = (keys, lines) => keys.map((key) => chart([{ name: key, points: lines.filter((line) => key in line).map((line) => [line.step, line[key]]) }],
      { ...options, caption: key, help: HELP[key] }));
    if (!run.metrics.length && !run.evals.length) fill(charts, h("p", { class: "quiet" }, "The run has made no step yet."));
    else {
      const reward = rewardPoints(run);
      fill(charts, reward.length > 0 && chart([{ name: "reward/mean", points: reward }], { ...options, caption: "reward/mean", help: `${HELP["reward/mean"]}; the strong line is the mean of ${smooth} steps` }, "lead"),
        evaluationColumns(run).slice(0, 1).map((column) => heldout(run, column, marks, "lead")), suiteCharts(run, marks));
    }
    if (more.open) {
      const never = names.filter((key) => run.metrics.every((line) => !line[key]));
      fill(metrics, draws(names.filter((key) => key !== "reward/mean" && !never.includes(key) && !key.startsWith("suite/")), run.metrics));
      zero.textContent = never.length ? `0 or unknown at every step: ${never.join(", ")}.` : "";
      const taken = [...new Set(run.timings.flatMap((line) => Object.keys(line)))].filter((key) => key.includes("/"));
      fill(times, ["time/", "memory/", "judge/"].flatMap((kind) => draws(taken.filter((key) => key.startsWith(kind)).sort(), run.timings)));
    }
    tasks(run, strip, signal);
  }
  more.addEventListener("toggle", draw);
  draw();
  follow(run, signal, draw);
}

/** The loss of a policy gradient says nothing, and a column that always equals the reward is drawn already. */
function isShown(run, key) {
  const phases = run.recipe.phases ?? [{}];
  if (key === "policy/loss") return phases.some((phase) => (phase.objective ?? run.recipe.objective)?.kind !== "policy_gradient");
  return key === "reward/mean" || run.metrics.some((line) => line[key] !== line["reward/mean"]);
}

function heldout(run, column, marks, size) {
  return chart([{ name: column, points: evaluationPoints(run, column) }],
    { caption: `held-out ${column}`, help: size === "lead" && evaluatedTasks(run, column), axis: "steps", dots: true, marks, end: run.step }, size);
}

/** The first held-out tasks, with their images at up to four evaluations; drawn again only when there are new images. */
async function tasks(run, strip, signal) {
  const all = run.sample_steps;
  const steps = [...new Set([0, 1 / 3, 2 / 3, 1].map((share) => all[Math.round(share * (all.length - 1))]))].filter((step) => step !== undefined);
  if (!steps.length || strip.dataset.steps === String(steps)) return;
  strip.dataset.steps = String(steps);
  const query = { set: "heldout", limit: TASKS };
  const found = await Promise.all(steps.map((step) => load(`/api/runs/${path(run.name)}/samples?${new URLSearchParams({ ...query, step })}`)));
  const lines = found.map(({ samples }) => new Map(samples.map((line) => [line.task, line])));
  const first = lines.find((each) => each.size) ?? new Map();
  if (signal.aborted || !first.size) return;
  const shown = (file, step, ...words) => h("figure", {}, thumbnail(run.name, step, file, words[0]), h("figcaption", {}, words[0], words[1] && [h("br"), h("b", {}, words[1])]));
  const article = (line) => h("article", { class: "task" }, h("p", {}, text(line.instruction)), h("div", { class: "strip" },
    line.source && shown(line.source, line.step, "source"),
    lines.map((each, index) => [steps[index], each.get(line.task)]).filter(([, made]) => made?.image)
      .map(([step, made]) => shown(made.image, step, step === 0 ? "before" : `step ${step}`, score(made.reward)))));
  fill(strip, h("h2", {}, "Held-out tasks over training"), h("div", { class: "tasks" }, [...first.values()].map(article)));
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
    ...(run.phase && run.phase !== "main" ? [["phase", run.phase]] : []),
    ["reward", number(run.reward)],
    ["per step", run.seconds_per_step === null ? "–" : `${number(run.seconds_per_step)} s`],
    ...(run.state === "running" ? [["time left", duration(run.seconds_left)]] : []),
    ...(run.judges ? [["judges so far", spent(run.judges)]] : []),
  ];
  const list = (rows) => h("dl", { class: "facts" }, rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, text(value)))));
  const faults = run.faults.filter((each) => each !== run.reason);
  return h("div", {},
    h("h1", {}, text(run.name), " ", state(run)),
    list(Object.entries(run.about)),
    run.reason && h("p", { class: run.state === "failed" ? "reason warning" : "reason" }, text(run.reason)),
    faults.length > 0 && h("p", { class: "warning" }, "Damage in its files: ", text(faults.join("; ")), "."),
    verdict(run),
    run.state === "running" && run.steps ? h("progress", { max: run.steps, value: run.step, "aria-label": "steps" }) : null,
    list(facts),
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
      { caption: `benchmark ${name}`, help: lines.at(-1).headline, axis: "steps", marks, dots: true, end: run.step }, "lead");
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
  const columns = evaluationColumns(run);
  const last = run.evals.at(-1);
  const rows = Object.entries(last.table ?? {}).map(([label, row]) => h("tr", {},
    h("th", { scope: "row" }, text({ all: "all tasks", headline: headline(run) }[label] ?? label.replace("=", " "))), h("td", {}, row.n ?? "–"),
    columns.map((column) => h("td", { title: interval(last.ci95?.[label]?.[column]) }, score(row[column])))));
  return h("section", {}, h("h2", {}, `Evaluation on ${last.split === "train" ? "trained-on" : "held-out"} tasks`),
    columns.length > 1 && h("p", { class: "quiet" }, evaluatedTasks(run, columns[1]).replace("mean", "Means"), "."),
    columns.length > 1 && h("div", { class: "charts" }, columns.slice(1, 7).map((column) => heldout(run, column, [], "small"))),
    h("div", { class: "scroll" }, h("table", {}, h("caption", {}, `Means after step ${last.step}`),
      h("thead", {}, h("tr", {}, ["", "tasks", ...columns].map((name) => h("th", { scope: "col" }, text(name))))), h("tbody", {}, rows))));
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
