"""The audit of a judge: scores images of known quality with it, and reports its faults."""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from retouch.distributed.ranks import scoring_device
from retouch.protocols import Reward
from retouch.recipe.reward_arguments import default_name, modules_in_argument, parse_reward, read_combined
from retouch.records.files import write_json
from retouch.rewards.base import RewardSection
from retouch.rewards.combine.combination import Combination, combination
from retouch_bench.judges import measures
from retouch_bench.judges.asking import AuditAnswers, LimitedClients, ask
from retouch_bench.judges.findings import JudgeScale, findings, rung_means
from retouch_bench.judges.ladders import PLAYGROUND_SIDE, Item, playground_ladders
from retouch_bench.judges.measures import SHOWN
from retouch_bench.judges.own_ladders import read_ladders
from retouch_bench.judges.page import write_page
from retouch_bench.judges.result import JudgeAudit, RungMean
from retouch_worlds.playground.world.scenes import SIZE

ITEMS, REPEATS, PRECISION = 20, 3, 0.05


def judge_audit(
    judge: str | RewardSection,
    *,
    ladder: str | Path | None = None,
    items: int | None = None,
    repeats: int = REPEATS,
    column: str | None = None,
    precision: float = PRECISION,
    budget: int | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    device: "torch.device | str | None" = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> JudgeAudit:
    """Score images of known quality with a judge, and write ``audit.json`` and ``audit.html`` into ``out``.

    ``judge``: a reward section, or its name on a command line: ``clip:FOLDER``, JSON, a file, a recipe, a run. ``ladder``: a folder
    with ``ladder.jsonl``; None makes ladders of the playground. ``items``: number of ladders, by default 20 of the playground or
    all of the folder. ``repeats``: how often each rung is scored, at least 2. ``column``: the column to audit instead of the
    ``combine`` of the reward. ``precision``: report how many answers must be averaged for this precision, a share of the span.
    ``budget``: maximum number of requests to each endpoint of the judge in this call, including retries. ``out``: the folder of
    this judge; an interrupted audit in it is continued. ``progress``: called with the number of finished items and of all items.

    Raises ValueError if an argument is out of range, the ladder or the judge has mistakes, or no image of the first item got a
    score.

    Example::

        >>> audit = retouch.judge_audit("playground", items=2, repeats=2)
        >>> print(audit)
        playground, 1 x overall: passes
        ...
        >>> audit.failed
        False
    """
    if repeats < 2 or (items is not None and items < 1) or not 0 < precision <= 1 or (budget is not None and budget < 1):
        raise ValueError(
            f"repeats {repeats}, items {items}, precision {precision:g}, budget {budget}: give at least 2 repeats (noise is the "
            "difference between them), 1 item, a precision from 0 to 1, and a budget of at least 1"
        )
    section = (
        judge if isinstance(judge, RewardSection) else parse_reward(read_combined(judge), allow_imports=modules_in_argument(judge))
    )
    name = section.name if isinstance(judge, RewardSection) or judge.lstrip().startswith("{") else default_name(judge)
    folder = Path("runs/judge-audits", name) if out is None else Path(out)
    made = _items(section, ladder, items, seed)
    audited: list[Combination] = []

    def combined(reward: Reward) -> Combination:
        audited.append(_combination(section, reward, column))
        return audited[0]

    where = device or scoring_device()
    asked = ask(
        section,
        combined,
        made,
        repeats=repeats,
        ledger=folder / "ledger.sqlite",
        device=where,
        clients=LimitedClients(where, budget),
        progress=progress,
    )
    if not asked.scored:
        raise ValueError(f"the budget of {budget} requests does not suffice for one item; raise it with --budget")
    result = _result(name, str(audited[0]), asked, repeats=repeats, precision=precision, folder=folder)
    write_json(folder / "audit.json", result.to_json())
    write_page(result, asked.scored[0].item)
    return result


def _items(section: RewardSection, ladder: str | Path | None, count: int | None, seed: int) -> list[Item]:
    if ladder is not None:
        found = read_ladders(Path(ladder))
        return found if count is None else found[:count]
    kinds = {kind for _, _, part in section.parts() for kind in part.data_kinds}
    if kinds - {"playground", "playground-indirect"}:
        raise ValueError(
            f"{section.name} scores only tasks of {', '.join(sorted(kinds))}; give ladders of such tasks with --ladder"
        )
    return playground_ladders(count or ITEMS, seed=seed, side=SIZE if kinds else PLAYGROUND_SIDE)


def _combination(section: RewardSection, reward: Reward, column: str | None) -> Combination:
    """Return the combination to audit. Raises ValueError if the column does not exist, or none of several is chosen."""
    columns = {name: known for name, known in reward.columns.items() if not known.diagnostic}
    if column is None and section.combine:
        return combination(section.combine, reward.columns)
    chosen = column or ("overall" if "overall" in columns else next(iter(columns)) if len(columns) == 1 else None)
    if chosen is None or chosen not in columns:
        named = "" if column is None else f"no column {column!r}; "
        raise ValueError(f"{section.name}: {named}choose one of its columns with --column: {', '.join(columns)}")
    return combination({chosen: 1.0 if columns[chosen].higher_is_better else -1.0}, reward.columns)


def _result(name: str, scored: str, asked: AuditAnswers, *, repeats: int, precision: float, folder: Path) -> JudgeAudit:
    scale = JudgeScale.of(asked.scored)
    truths = {rung.name: rung.truth for one in asked.scored for rung in one.item.rungs}
    rungs = [
        RungMean(name=rung, truth=truths[rung] or 0.0, mean=found.mean, low=found.interval(SHOWN)[0], high=found.interval(SHOWN)[1])
        for rung, found in rung_means(asked.scored).items()
    ]
    bits, interval = measures.useful_bits(asked.scored)
    noise, spent = scale.noise.mean / scale.span**2, asked.spending
    return JudgeAudit(
        judge=name,
        scored=scored,
        items=len(asked.scored),
        left=asked.left,
        repeats=repeats,
        lines=findings(asked),
        rungs=rungs,
        bits=bits,
        bits_interval=interval,
        precision=precision,
        repeats_needed=None if math.isnan(noise) else measures.repeats_for(noise, precision),
        samples=sum(len(given) for one in asked.scored for given in one.scores.values()),
        requests=spent.attempts.total(),
        seconds=spent.seconds,
        tokens=spent.tokens,
        cost=spent.cost,
        folder=folder,
    )
