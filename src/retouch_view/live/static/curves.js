// The curves of runs: points [step, value, low, high], where low and high are a 95 % interval or null; and the axes of a comparison.

/** The mean reward of each step's samples with its 95 % interval, as in report.html. Older runs have no intervals. */
export function rewardPoints(run) {
  return run.metrics.filter((line) => "reward/mean" in line).map((line) => {
    const [mean, half] = ["mean", "ci95"].map((name) => line[`reward/${name}`] ?? null);
    if (mean === null || half === null) return [line.step, mean, null, null];
    return [line.step, mean, mean - half, mean + half];
  });
}

/** The mean of a column over the tasks of each evaluation. */
export function evaluationPoints(run, column) {
  return run.evals.map((line) => [line.step, line.table?.all?.[column] ?? null, ...(line.ci95?.all?.[column] ?? [null, null])]);
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
