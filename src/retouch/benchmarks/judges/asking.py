"""Gets the images of an audit scored, through a ledger: an audit that was interrupted asks only what has no answer yet."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from retouch.benchmarks.judges.ladders import Item, Probe
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, close
from retouch.rewards.combine.combination import Combination
from retouch.rewards.identity import describe, short
from retouch.rewards.judges.panel import Panel
from retouch.rewards.ledger.answers import AnswerCache
from retouch.rewards.ledger.caching import with_cache
from retouch.rewards.ledger.database import Database
from retouch.rewards.quota.quota import BudgetSpent
from retouch.rewards.scoring import scores_of
from retouch.rewards.vlm.base import JudgeClients, JudgeModel
from retouch.rewards.vlm.endpoint_settings import EndpointSettings, JudgeQuota
from retouch.rewards.vlm.questions import Answer, JudgeClient, Question
from retouch.types import Sample, Scores

_SEEDS = 10_000  # between two repeats, more than any number of answers per question
_UNREADABLE = ("unusable answer", "refusal", "unreadable reply")


@dataclass(frozen=True, slots=True, eq=False)
class ProbeScores:
    """The combined scores of an item's probes by name, each over its repeats; NaN where the judge gave none."""

    item: Item
    scores: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class GivenAnswer:
    """An answer of the judge: which question it belongs to, whatever the seed, its length in characters, and its mean score."""

    question: int
    length: int
    score: float


@dataclass(slots=True)
class Spending:
    """What the ledger says of the answers. ``attempts``: requests by how they ended, "" for a usable answer. ``cost``: None if no
    price is known."""

    attempts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: int = 0
    cost: float | None = None

    @property
    def faults(self) -> str:
        """The most common reasons for which requests failed, in words."""
        wrong = Counter({fault: count for fault, count in self.attempts.items() if fault})
        return ", ".join(f"{count} {fault}" for fault, count in wrong.most_common(3))

    @property
    def received(self) -> int:
        """The requests to which the judge replied with an answer, usable or not."""
        return self.attempts[""] + self.unreadable

    @property
    def unreadable(self) -> int:
        """Those of which no score could be read."""
        return sum(count for fault, count in self.attempts.items() if fault in _UNREADABLE)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The result of asking. ``left``: items that the budget did not suffice for."""

    scored: Sequence[ProbeScores]
    answers: Sequence[GivenAnswer]
    spending: Spending
    left: int


class _RepeatedClient:
    """Asks each repeat with seeds of its own, and notes the answers. It stands in front of the ledger."""

    def __init__(self, client: JudgeClient, asking: "_Asking") -> None:
        self.client = client
        self.identity = client.identity
        self._asking = asking

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        shift = _SEEDS * self._asking.repeat
        answers = self.client.ask([replace(question, seed=question.seed + shift) for question in questions])
        for question, answer in zip(questions, answers, strict=True):
            self._asking.note(question, answer)
        return answers

    def close(self) -> None:
        close(self.client)


class _Asking:
    """The repeat that is asked now, and the answers so far."""

    def __init__(self) -> None:
        self.repeat = 0
        self.answers: list[GivenAnswer] = []
        self._questions: dict[tuple[str, tuple[object, ...]], int] = {}

    def note(self, question: Question, answer: Answer) -> None:
        """Keep an answer that has scores."""
        if answer.scores:
            parts = tuple(part if isinstance(part, str) else id(part) for part in question.parts)  # the items keep the images
            number = self._questions.setdefault((question.rubric, parts), len(self._questions))
            self.answers.append(GivenAnswer(number, len(answer.text), sum(answer.scores.values()) / len(answer.scores)))

    def kept(self, reward: Reward, cache: AnswerCache) -> Reward:
        """The reward behind the ledger, with seeds of its own for each repeat."""
        made = with_cache(reward, cache)
        panel = getattr(made, "panel", None)
        if isinstance(panel, Panel):
            panel.client = _RepeatedClient(panel.client, self)
        return made


class LimitedClients(JudgeClients):
    """Clients that make at most ``calls`` requests to each endpoint."""

    def __init__(self, device: torch.device | str, calls: int | None) -> None:
        super().__init__(device)
        self._calls = calls

    def open(self, model: JudgeModel) -> JudgeClient:
        if self._calls is not None and isinstance(model, EndpointSettings):
            quota = model.quota or JudgeQuota()
            calls = self._calls if quota.calls is None else min(quota.calls, self._calls)
            model = model.model_copy(update={"quota": quota.model_copy(update={"calls": calls})})
        return super().open(model)


def ask(
    section: RewardSection,
    combined: Callable[[Reward], Combination],
    items: Sequence[Item],
    *,
    repeats: int,
    ledger: Path,
    device: torch.device | str,
    clients: JudgeClients,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Asked:
    """Score every rung ``repeats`` times and every probe once, item by item.

    ``ledger``: the file that keeps the answers. ``clients``: open the judge's clients. ``progress``: called with the finished items
    and their number. ValueError: the ledger is another judge's, no image of the first item got a score, or
    what the reward raises.
    """
    asking = _Asking()
    scored: list[ProbeScores] = []
    grouped = any(getattr(part, "compares_groups", False) for _, _, part in section.parts())
    with closing(Database(ledger)) as database:
        cache = AnswerCache(database)
        reward = section.build(device=device, clients=clients, keep=lambda made: asking.kept(made, cache))
        try:
            _require_same_judge(database, reward)
            combination = combined(reward)
            for item in items:
                scored.append(_score_item(reward, combination, item, asking, repeats=repeats, grouped=grouped))
                progress(len(scored), len(items))
                if len(scored) == 1 and all(math.isnan(value) for values in scored[0].scores.values() for value in values):
                    raise ValueError(
                        f"no image of the first item got a score ({_spending(database).faults or 'no reason is known'}); "
                        "correct the judge and start the audit again"
                    )
        except BudgetSpent:
            pass
        finally:
            close(reward)
        spending = _spending(database)
    return Asked(scored, asking.answers, spending, len(items) - len(scored))


def _score_item(
    reward: Reward, combination: Combination, item: Item, asking: _Asking, *, repeats: int, grouped: bool
) -> ProbeScores:
    """``grouped``: the reward compares images with each other, so that only the rungs are in the group."""
    values: dict[str, list[float]] = {}
    for repeat in range(repeats):
        asking.repeat = repeat
        probes = item.rungs if repeat or grouped else (*item.rungs, *item.probes)
        scores = scores_of(reward, [_numbered(probe, repeat) for probe in probes])
        for probe, value in zip(probes, _scaled(combination, scores), strict=True):
            values.setdefault(probe.name, []).append(value)
    return ProbeScores(item, values)


def _numbered(probe: Probe, repeat: int) -> Sample:
    """The sample, with a task of its own for each repeat: a reward server is then asked again."""
    return replace(probe.sample, task=replace(probe.sample.task, id=f"{probe.sample.task.id}#{repeat}"))


def _scaled(combination: Combination, scores: Scores) -> list[float]:
    """The combined scores as shares of their range, 0 to 1."""
    values = combination(scores).double()
    return ((values - combination.low) / (combination.high - combination.low)).tolist()


def _require_same_judge(database: Database, reward: Reward) -> None:
    """ValueError: the ledger has the answers of another judge."""
    own, about = short(describe(reward)), json.dumps(describe(reward), sort_keys=True)
    with database.writing() as connection:
        known = [row[0] for row in connection.execute("SELECT fingerprint FROM judges")]
        if not known:
            connection.execute("INSERT INTO judges (fingerprint, about, since) VALUES (?, ?, 0)", (own, about))
    if known and own not in known:
        raise ValueError(f"{database.path} has the answers of another judge, or of other settings; give another folder with --out")


def _spending(database: Database) -> Spending:
    made = Spending()
    priced = True
    with database.reading() as connection:
        rows = connection.execute(
            "SELECT scores IS NOT NULL, fault, faults, seconds, input_tokens + output_tokens, cost FROM answers"
        ).fetchall()
    for usable, fault, faults, seconds, tokens, cost in rows:
        made.attempts.update(json.loads(faults))
        made.attempts["" if usable else fault] += 1
        made.seconds += seconds
        made.tokens += tokens
        priced = priced and cost is not None and math.isfinite(cost)
        made.cost = (made.cost or 0.0) + (cost or 0.0)
    if not priced or not rows:
        made.cost = None
    return made
