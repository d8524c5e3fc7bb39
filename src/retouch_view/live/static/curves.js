// The curves of runs: points [step, value, low, high], where low and high are a 95 % interval, null or left out; and the axes of a
// comparison.

/** The mean reward of each step's samples. */
export function rewardPoints(run) {
  return run.metrics.filter((line) => "reward/mean" in line).map((line) => [line.step, line["reward/mean"]]);
}

/** The mean of a column over the tasks of each evaluation: over the headline tasks, if they are not all tasks. */
export function evaluationPoints(run, column) {
  const row = evaluatedRow(run);
  return run.evals.map((line) => [line.step, line.table?.[row]?.[column] ?? null, ...(line.ci95?.[row]?.[column] ?? [null, null])]);
}

export function evaluatedRow(run) {
  return run.evals.length > 0 && run.evals.every((line) => line.table?.headline) ? "headline" : "all";
}

/** What the means of evaluations are of, in words. */
export function evaluatedTasks(run, column) {
  const count = run.evals.at(-1)?.table?.[evaluatedRow(run)]?.n ?? 0;
  const few = evaluationPoints(run, column).every(([, , low]) => low === null);
  return `mean over ${count} task${count === 1 ? "" : "s"}${evaluatedRow(run) === "headline" ? ` of ${headline(run)}` : ""}, ${
    few ? "too few for an interval" : "with 95 % intervals"}`;
}

/** What the headline tasks of a run have in common: "complexity 2 or 3". */
export function headline(run) {
  const tags = Object.entries(run.recipe.eval?.headline ?? {}).map(([tag, values]) => `${tag} ${[values].flat().join(" or ")}`);
  return tags.join(" and ") || "the headline";
}

/** The columns of the evaluations, that of the verdict first. The combined reward is left out if it equals another column. */
export function evaluationColumns(run) {
  const rows = run.evals.flatMap((line) => Object.values(line.table ?? {}));
  const found = [...new Set(rows.flatMap(Object.keys))].filter((name) => name !== "n");
  const same = found.some((name) => name !== "reward" && rows.every((row) => row[name] === row.reward));
  const first = run.verdict?.column;
  return found.filter((name) => !(same && name === "reward")).sort((one, two) => (two === first) - (one === first));
}

/** Points at other places: ``place`` gives the place of a step, or null where it is not known. */
export function placed(points, place) {
  return points.map(([step, ...rest]) => [place(step), ...rest]).filter(([at]) => at !== null);
}

/** What curves can be drawn over: its label; for a run, the place of a step; and what keeps a run from having one, otherwise null. */
export const AXES = {
  step: { label: "steps", place: () => (step) => step, missing: () => null },
  samples: {
    label: "images made",
    place: images,
    missing: () => null,
  },
  seconds: { label: "seconds of training", place: (run) => summed(run, "time/step"), missing: () => null },
  cost: { label: "dollars paid to judges", place: (run) => known(run, "judge/cost"), missing: withoutCost },
  requests: { label: "requests to judges", place: (run) => known(run, "judge/requests"), missing: withoutRequests },
};

/** Images that training made up to a step, with those of groups that ``rollout.refill`` replaced; a supervised step makes none. */
function images(run) {
  const found = new Map([[0, 0]]);
  let sum = 0;
  for (const line of run.metrics) {
    const phase = (run.recipe.phases ?? []).find((each) => each.name === line.phase);
    const size = (key) => phase?.[key] ?? run.recipe[key] ?? 1;
    if ("reward/mean" in line) sum += line["refill/samples"] ?? size("tasks_per_step") * size("group_size");
    found.set(line.step, sum);
  }
  return (step) => found.get(step) ?? null;
}

function summed(run, key) {
  const found = new Map([[0, 0]]);
  let sum = 0;
  for (const line of run.timings) found.set(line.step, (sum += line[key] ?? 0));
  return (step) => found.get(step) ?? null;
}

/** The totals of a run at its steps; nothing was paid before the evaluation at step 0. */
function known(run, key) {
  const found = new Map([[0, 0], ...run.timings.filter((line) => typeof line[key] === "number").map((line) => [line.step, line[key]])]);
  return (step) => found.get(step) ?? null;
}

function withoutRequests(run) {
  if (run.timings.some((line) => "judge/requests" in line)) return null;
  return run.judges ? "was recorded without the totals of each step" : "asked no judge";
}

function withoutCost(run) {
  const missing = withoutRequests(run);
  if (missing) return missing;
  const priced = run.timings.some((line) => "judge/cost" in line);
  if (!priced) return "has a judge without prices";
  return run.timings.some((line) => line["judge/unpriced_requests"]) ? "has one judge with prices and one without" : null;
}
