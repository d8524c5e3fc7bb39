"""Generates docs/league.md and its figures from the kept runs alone."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import agreement
import runs
from league_curves import draw
from ranking import Finals, Rank, interquartile_mean, mean_interval, ranking, time_to
from runs import diverged, share_of_gap
from worlds import ROOT, WORLDS, World

from retouch.core.intervals import Interval

PAGE = ROOT / "docs" / "league.md"
PICTURES = ROOT / "docs" / "pictures"
SHARES = (0.25, 0.5, 0.75)
WITH_INTERVAL = 3
"""Number of the best curves of a figure that have intervals. More bands would cover each other."""
Record = dict[str, Any]

INTRODUCTION = """# League

Which algorithm learns best for the same budget? Every algorithm starts from the same base model, with the same tasks, the same
judge and the same number of network evaluations. `make league` makes this page, and continues where it was stopped; the code is in
`measurements/league`.

- **Budget.** A network evaluation is one sample that goes once through the trained network: an image at one denoising step, or a
  completion. A forward pass with its backward pass counts 3. The number of training steps follows from the recipe by arithmetic
  (`measurements/league/budget.py`), so a run is the same on every machine. The tables also have the images that were made and the
  CPU seconds, which are those of the whole run with one thread, with its held-out evaluations and without the import of libraries.
- **Tuning.** Every algorithm has the same number of trials. The first trial has the settings in
  `measurements/league/contestants.py`, most of them published. The others are drawn by the same Optuna sampler, which gives every
  algorithm the same learning rates. A trial is scored on the `validation` split of the playground.
- **Final runs** have the settings of the best trial, new seeds, and the tasks of the `test` split, which tuning never sees.
- **Share of gap.** The score of a run on a stratum of tasks is the share of the gap that it closes: 0 is the base model, 1 the
  score of the right answers. As in rliable (arXiv 2108.13264), the tables have the interquartile mean over seeds and strata, and
  the probability that a run is better than a run of another algorithm. The 95 % intervals are from a bootstrap that draws seeds,
  and held-out tasks, the same ones for all algorithms. With one seed they do not contain the spread between seeds.
- **To 0.25, 0.5, 0.75**: the network evaluations until this share of the gap is reached, with straight lines between held-out
  evaluations; the median of the seeds, and a dash if it is a run that did not reach it.
- **Diverged**: the trials that ended with an error or with a share of the gap below -0.1.

With one optimizer step per rollout, the ratio of current to old probability is 1, so a clipped ratio, GSPO, CISPO, DPPO and
REINFORCE have the same gradient. This is why GSPO, CISPO, DPPO and GRPO-Guard take four optimizer steps per rollout here. On
policies that write tokens, GRPO and PPO with a value head take four too.

Best-of-n distillation is RAFT for a student with few denoising steps: it samples with as many steps as the others, pairs each of
the best images with the noise that it was sampled from (reflow), and is evaluated with fewer steps.

DRaFT and ReFL are upper references: they follow the gradient of the distance to the correct image, which the other algorithms
never see, and which is the same with an exact judge and with one that errs.
"""
DEFAULTS = """## What follows for the defaults

No default of a full-size recipe was changed because of this page. A ranking that decides a default would have to hold for exact and
noisy judges, for several kinds of tasks and for several sizes of network. The rank correlations above say how far it holds between
judges, between kinds of tasks and between two sizes of the editor. [Scaling](scaling.md) has more runs with the larger editor, all
of one algorithm.

For a run of your own: try first what is in the first third of all worlds of your kind of policy, as listed above, and nothing that
is in the last third of all of them. The order in between carries over only in part to another judge, another kind of task or
another size of network, as the correlations show. So compare the algorithms that you consider on a small run with your own reward.
"""
LIMITS = """## What this page does not show

- The models are tiny, and the images are of one kind. A ranking here is a reason to try an algorithm on a large model, not a proof.
- Runs are short. Algorithms that learn slowly and end higher are placed too low; the curves show which ones are still rising.
- A few trials do not tune an algorithm well. The tables of settings show how much the results depend on them. Where the best trial
  is near the edge of its range, a wider search may change the order. The second trial's learning rate is close to that of the
  first, so with one or two trials the learning rate is not tuned.
- Network evaluations stand for floating-point operations. They do not contain memory, nor the cost of the reward.
- The noise of the second judge is assumed, not measured on a vision-language model.
"""
GPU = """## On a GPU

`python measurements/league/league.py --device cuda` runs the same league on a GPU. Its records, page and figures are in
`runs/league-cuda`, apart from those of this page. It has not been run: all runs of this page were made on CPUs.
"""


def write(kept: Path, *, file: Path = PAGE, pictures: Path = PICTURES) -> Path:
    """Write the page and its figures from the kept runs. Returns ``file``, the page's path."""
    pictures.mkdir(parents=True, exist_ok=True)
    for world in WORLDS:
        found = records(kept, world)
        if figure := curves(world, found):
            (pictures / f"league-{world.name}.svg").write_text(figure)
    file.write_text(page(kept), encoding="utf-8")
    return file


def records(kept: Path, world: World) -> dict[str, list[Record]]:
    """The kept runs by name of the contestant, without contestants that have no kept run."""
    found = {each.name: list(runs.read(kept, world, each.name).values()) for each in world.contestants}
    return {name: known for name, known in found.items() if known}


def page(kept: Path) -> str:
    """The text of docs/league.md."""
    lines = [INTRODUCTION]
    found = [(world, records(kept, world)) for world in WORLDS]
    every = [run for _, known in found for each in known.values() for run in each]
    hours = sum(run["cpu_seconds"] for run in every) / 3600
    lines += [f"So far: {len(every)} runs, {hours:.1f} CPU hours.", ""]
    for world, known in found:
        lines += section(world, known) if known else []
    lines += agreement.section([(world.title, scores(known)) for world, known in found])
    missing = [world.title for world, known in found if not known]
    if missing:
        lines += ["## Not run yet", "", *(f"- {title}" for title in missing), ""]
    return "\n".join([*lines, DEFAULTS, LIMITS, GPU])


def section(world: World, found: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """The tables of a world."""
    yield f"## {world.title}\n"
    tag, values = world.strata
    yield (
        f"`{world.recipe}`, with what `measurements/league/worlds.py` changes. {world.budget:,} network evaluations a run. "
        f"Scored by `{world.column}` on held-out tasks of {tag} {', '.join(values)}.\n"
    )
    finals = {name: completed(known) for name, known in found.items()}
    contestants = [Finals.of(name, known) for name, known in finals.items() if known]
    if contestants:
        tried = number_of([len(trials(found[each.name])) for each in contestants], "trial")
        final = number_of([each.seeds for each in contestants], "final run")
        yield f"So far, each algorithm in the table has had {tried} and {final}.\n"
        yield from table(world, ranking(contestants), found, finals)
        yield from remarks(finals)
        yield f"\n![Share of the gap over network evaluations](pictures/league-{world.name}.svg)\n"
        yield f"{figure_caption(contestants, finals)}\n"
        away = statistics.fmean(
            abs(best_share(found[each.name]) - share_of_gap(run)) for each in contestants for run in finals[each.name]
        )
        yield (
            f"The share of the gap of a final run differs by {away:.2f} on average from that of the best trial, which has the same "
            "settings, another seed and other held-out tasks. Differences between algorithms below this may be chance.\n"
        )
    untested = [each.name for each in world.contestants if not finals.get(each.name)]
    if untested:
        yield f"Without a final run so far: {'; '.join(untested)}.\n"
    yield f"### {world.title}: settings\n"
    yield from settings(world, found)


def remarks(finals: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """A paragraph for each algorithm whose images are made with fewer denoising steps than those of the others."""
    for name, of in finals.items():
        if not of or "few_steps" not in of[0]:
            continue
        few = of[0]["few_steps"]
        base, ceiling = of[0]["curve"][0][1], of[0]["ceiling"]
        yield (
            f"\n{name} is evaluated with {few['steps']} denoising steps, the other algorithms with {few['standard']}. Its shares "
            f"are measured against the same base model with {few['standard']} steps. Without training, the base model with "
            f"{few['steps']} steps has a share of {(few['base'] - base) / (ceiling - base):+.2f}."
        )


def figure_caption(contestants: Sequence[Finals], finals: Mapping[str, Sequence[Record]]) -> str:
    """What the lines and intervals of a figure are."""
    count = min(WITH_INTERVAL, len(contestants))
    best = sorted(finals, key=lambda name: -last_share(finals[name]))[:count]
    lacking = [name for name in best if not scored_throughout(finals[name])]
    shown = "a bar at the end of the line" if lacking else "a band"
    if lacking and len(lacking) < count:
        shown = f"a band, or a bar at the end of the line ({', '.join(lacking)})"
    note = (
        f"Lines are means over the seeds. The best {count} are thick and have {shown}: the 95 % interval of the mean, from a "
        "bootstrap that draws seeds and held-out tasks. The other lines are thin and have none."
    )
    if lacking:
        note += (
            " A band needs the scores of all tasks at every evaluation; `python measurements/league/league.py --again` repeats the "
            "final runs whose records lack them."
        )
    return note


def last_share(of: Sequence[Record]) -> float:
    """The mean over the seeds of the share of the gap after the last step; -inf without a run."""
    return statistics.fmean(map(share_of_gap, of)) if of else float("-inf")


def scored_throughout(of: Sequence[Record]) -> bool:
    """Whether the records have the scores of tasks at every evaluation."""
    return all("between" in run for run in of)


def scores(found: Mapping[str, Sequence[Record]]) -> dict[str, float]:
    """The share of the gap of each algorithm that has final runs: the interquartile mean over seeds and strata."""
    finals = {name: completed(known) for name, known in found.items()}
    return {name: interquartile_mean(Finals.of(name, known).shares()) for name, known in finals.items() if known}


def number_of(counts: Sequence[int], what: str) -> str:
    """The counts as a text such as "2 trials", or "2 to 3 trials" if they differ."""
    low, high = min(counts), max(counts)
    return f"{low} {what}{'s' * (low != 1)}" if low == high else f"{low} to {high} {what}s"


def completed(known: Sequence[Record]) -> list[Record]:
    """The finished final runs with the settings of the best trial, ordered by seed."""
    best = max(trials(known), key=share_of_gap, default={"settings": None})
    finals = [run for run in known if run["stage"] == "final" and run["ended"] == "finished"]
    return sorted((run for run in finals if run["settings"] == best["settings"]), key=lambda run: run["seed"])


def best_share(known: Sequence[Record]) -> float:
    """The share of the gap of the best trial."""
    return max(map(share_of_gap, trials(known)))


def trials(known: Sequence[Record]) -> list[Record]:
    """The tuning runs, ordered by number."""
    return sorted((run for run in known if run["stage"] == "tuning"), key=lambda run: run["number"])


def table(
    world: World, ranks: Sequence[Rank], found: Mapping[str, Sequence[Record]], finals: Mapping[str, Sequence[Record]]
) -> Iterator[str]:
    """The ranking as a table, with all measurements of the final runs."""
    kept = [f"change of {world.preservation}"] if world.preservation else []
    to = [f"to {share:g}" for share in SHARES]
    header = [
        "algorithm",
        "source",
        "seeds",
        "share of gap",
        "better than another",
        *to,
        *kept,
        "diverged",
        "steps",
        "images",
        "CPU s",
    ]
    yield f"| {' | '.join(header)} |"
    yield "| --- " * len(header) + "|"
    for rank in ranks:
        of = finals[rank.name]
        source = world.contestant(rank.name).source
        tried = trials(found[rank.name])
        few = of[0].get("few_steps")
        cells = [
            f"{rank.name} ({few['steps']} steps)" if few else rank.name,
            f"arXiv {source}" if source[0].isdigit() else source,
            str(len(of)),
        ]
        cells += [with_interval(rank.score, rank.interval), with_interval(rank.better, rank.better_interval)]
        cells += [thousands(median_time(of, share)) for share in SHARES]
        if world.preservation:
            cells.append(f"{statistics.fmean(run['preservation'][1] - run['preservation'][0] for run in of):+.2f}")
        cells.append(f"{sum(map(diverged, tried))} of {len(tried)}")
        cells += [f"{statistics.fmean(run[name] for run in of):.0f}" for name in ("steps", "images", "cpu_seconds")]
        yield f"| {' | '.join(cells)} |"


def settings(world: World, found: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """The table of all trials: their settings and shares of the gap on validation tasks."""
    yield "Share of the gap on validation tasks after each trial; the best one is used in the final runs.\n"
    yield "| algorithm | settings: share of gap |"
    yield "| --- | --- |"
    for name, known in found.items():
        tried = trials(known)
        best = max(tried, key=share_of_gap, default=None)
        cells = []
        for run in tried:
            text = ", ".join(f"{key} {value:g}" for key, value in run["settings"].items())
            share = f"{share_of_gap(run):+.2f}" if run["ended"] == "finished" else f"error ({run['ended']})"
            cells.append(f"{text}: **{share}**" if run is best else f"{text}: {share}")
        yield f"| {name} | {'<br>'.join(cells)} |"
    yield ""


def curves(world: World, found: Mapping[str, Sequence[Record]]) -> str | None:
    """The figure of a world, with the mean over the seeds at each evaluation; None if the world has no final runs."""
    finals = {name: of for name, known in found.items() if (of := completed(known))}
    if not finals:
        return None
    lines = {}
    for name, of in finals.items():
        points = zip(*(shares_over_time(run) for run in of), strict=True)
        lines[name] = [(statistics.fmean(x for x, _ in at), statistics.fmean(y for _, y in at)) for at in points]
    best = sorted(finals, key=lambda name: -last_share(finals[name]))[:WITH_INTERVAL]
    bounds = {name: curve_intervals(name, finals[name]) for name in best}
    return draw(lines, title=f"{world.title}: share of the gap", intervals={name: known for name, known in bounds.items() if known})


def curve_intervals(name: str, of: Sequence[Record]) -> list[tuple[float, float, float]]:
    """The intervals (network evaluations, low, high) of an algorithm's mean curve.

    They are those of every evaluation, beginning with 0 before training, or only of the last one if records lack the scores of
    tasks during training. Empty if there are too few tasks for an interval.
    """
    throughout = scored_throughout(of)
    scored = zip(*([*run.get("between", ()), run["after"]] if throughout else [run["after"]] for run in of), strict=True)
    found = [(0.0, 0.0, 0.0)] if throughout else []
    columns = list(scored)
    places = [statistics.fmean(at) for at in zip(*([x for x, _ in run["curve"]] for run in of), strict=True)]
    for x, after in zip(places[-len(columns) :], columns, strict=True):
        runs_there = [{**run, "after": tasks} for run, tasks in zip(of, after, strict=True)]
        interval = mean_interval(Finals.of(name, runs_there))
        if interval is None:
            return []
        found.append((x, interval.low, interval.high))
    return found


def shares_over_time(run: Record) -> list[tuple[float, float]]:
    """The curve of a run: (network evaluations, share of the gap)."""
    (_, base), *_ = run["curve"]
    return [(spent, (score - base) / (run["ceiling"] - base)) for spent, score in run["curve"]]


def median_time(of: Sequence[Record], share: float) -> float | None:
    """The median over the seeds of the evaluations until the share is reached; None if the median seed never reaches it."""
    times = [time_to(run["curve"], share, ceiling=run["ceiling"]) for run in of]
    middle = statistics.median(float("inf") if time is None else time for time in times)
    return None if middle == float("inf") else middle


def thousands(count: float | None) -> str:
    """The count as a text such as "2.5k"; a dash for None."""
    return "-" if count is None else f"{count / 1000:.1f}k"


def with_interval(value: float, interval: Interval | None) -> str:
    """The value as a text, followed by its interval if there is one."""
    return f"{value:.2f}" if interval is None else f"{value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
