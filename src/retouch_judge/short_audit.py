"""The short audit of a judge before a benchmark, which detects a judge that is useless.

It asks the VIEScore questions about the first ladders of the playground, once each. It refuses a judge if its answers cannot be
read, if it gives all images the same score, or if it prefers images without the edit. The result is stored in the user's folder, by
name, settings and address of the judge, and used again. ``audit`` measures a judge in full.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from retouch.config.consent import user_folder
from retouch.distributed.ranks import Ranks
from retouch.records import files
from retouch.rewards.base import BudgetSpent, JudgeClients, RewardSection
from retouch.rewards.combination import combination
from retouch.rewards.identity import short
from retouch_judge.audit_findings import RankAgreement, mean, score_at_end
from retouch_judge.audit_ladders import playground_ladders
from retouch_judge.audit_scores import AuditAnswers, ask
from retouch_judge.base import JudgeReward
from retouch_judge.models import JudgeModel
from retouch_judge.rewards import VieScore

ITEMS = 4
MOST_UNREADABLE = 0.25
_VERSION = 1
_WITHOUT = "skip the audit with --no-audit (in a recipe: eval.audit: false)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortAudit:
    """The result of a short audit. ``images``: number of images that were sent to the judge. ``missing``: how many of them got
    no score. ``unreadable``: share of the received answers that could not be read. ``best``, ``worst``: mean scores of images with
    the whole edit and with none of it, 0 to 1. ``right``: share of pairs in the right order. ``problem``: why the judge is refused,
    empty if it passes."""

    judge: str
    images: int
    missing: int
    unreadable: float
    best: float
    worst: float
    right: float
    problem: str = ""

    def __str__(self) -> str:
        return (
            f"audit of the judge {self.judge}: {self.problem or 'passes'} ({self.images} images; mean score {self.best:.2f} with "
            f"the whole edit and {self.worst:.2f} without; {self.right:.0%} of pairs in the right order; {self.unreadable:.0%} of "
            "answers unreadable)"
        )


def audit_judges(section: RewardSection, *, ranks: Ranks, clients: JudgeClients, note: Callable[[str], None]) -> None:
    """Audit the models that a reward asks, on the first rank, unless the result of an earlier audit is stored.

    ``clients``: opens the clients; the requests of the audit count against their budgets. ``note``: called with the results as
    sentences. Raises on every rank: ValueError if a judge fails, or BudgetSpent, a ValueError, if the budget does not suffice.
    """
    refusal: ValueError | None = None
    if ranks.is_main:
        try:
            for model in judge_models(section):
                note(str(_required(model, ranks, clients)))
        except ValueError as error:
            refusal = error
    worst = int(ranks.max(torch.tensor(0.0 if refusal is None else 2.0 if isinstance(refusal, BudgetSpent) else 1.0)))
    if refusal is not None:
        raise refusal
    if worst:
        kind = BudgetSpent if worst == 2 else ValueError
        raise kind("a judge failed its audit; the log of the first rank says why")


def judge_models(section: RewardSection) -> Iterator[JudgeModel]:
    """Yield the models that a reward asks, each once."""
    found = {part.judge.model_dump_json(): part.judge for _, _, part in section.parts() if isinstance(part, JudgeReward)}
    yield from found.values()


def _required(model: JudgeModel, ranks: Ranks, clients: JudgeClients) -> ShortAudit:
    """Return the stored audit of the judge, or make a new one. Raises ValueError if the judge fails it."""
    kept = user_folder("XDG_STATE_HOME", ".local/state")
    if kept is None:
        with tempfile.TemporaryDirectory() as temporary:
            return _audited(model, Path(temporary), ranks, clients)
    settings = {key: value for key, value in model.model_dump(mode="json").items() if key not in model.changeable}
    identity = short([_VERSION, VieScore.version, type(model).__qualname__, settings, model.description])
    folder = kept / "judge-audits" / identity
    if (folder / "audit.json").is_file():
        return ShortAudit(**{**files.read_record(folder / "audit.json"), "judge": f"{model.description} (earlier)"})
    made = _audited(model, folder, ranks, clients)
    files.write_json(folder / "audit.json", asdict(made))
    return made


def _audited(model: JudgeModel, folder: Path, ranks: Ranks, clients: JudgeClients) -> ShortAudit:
    items = [replace(item, probes=()) for item in playground_ladders(ITEMS)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        asked = ask(
            VieScore(judge=model),
            lambda reward: combination({"overall": 1.0}, reward.columns),
            items,
            repeats=1,
            ledger=folder / "ledger.sqlite",
            device=ranks.device,
            clients=clients,
        )
    except ValueError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(f"the judge {model.description} cannot be audited: {error}; or {_WITHOUT}") from error
    if asked.left:
        raise BudgetSpent(f"the budget of the judge {model.description} does not suffice for its audit; raise it, or {_WITHOUT}")
    made = result_of(model.description, asked)
    if made.problem:
        shutil.rmtree(folder, ignore_errors=True)  # so that a corrected judge is asked again
        raise ValueError(f"{made}. Correct the judge, or {_WITHOUT}; `retouch tools audit` measures it in full")
    return made


def result_of(judge: str, asked: AuditAnswers) -> ShortAudit:
    """Compute the result from the scores; ``problem`` is the first one that makes the judge useless."""
    scored, spent = asked.scored, asked.spending
    values = [value for one in scored for given in one.scores.values() for value in given]
    known = [value for value in values if not math.isnan(value)]
    unreadable = spent.unreadable / spent.received if spent.received else 0.0
    best, worst = (mean([score_at_end(one, top=top) for one in scored]) for top in (True, False))
    problem = ""
    if max(unreadable, 1 - len(known) / len(values)) > MOST_UNREADABLE:
        faults = f" ({spent.faults})" if spent.faults else ""
        problem = (
            f"{len(values) - len(known)} of {len(values)} images got no score and {spent.unreadable} of {spent.received} answers "
            f"could not be read{faults}"
        )
    elif max(known) == min(known):
        problem = f"it gives every image the same score, {known[0]:.2f}"
    elif not best > worst:
        problem = "it scores images without the edit no lower than images with the whole edit"
    return ShortAudit(
        judge=judge,
        images=len(values),
        missing=len(values) - len(known),
        unreadable=unreadable,
        best=best,
        worst=worst,
        right=RankAgreement.of(scored, noise=0.0).right.mean,
        problem=problem,
    )
