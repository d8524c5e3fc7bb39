"""Scores the images of an audit through a ledger: an interrupted audit asks only the questions that have no answer yet."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from retouch.protocols import Reward
from retouch.rewards.base import BudgetSpent, JudgeClients, RewardSection, close
from retouch.rewards.combination import Combination
from retouch.rewards.identity import describe, short
from retouch.rewards.ledger.database import Database
from retouch.rewards.scoring import scores_of
from retouch_judge.audit_ladders import Item
from retouch_judge.base import Panel
from retouch_judge.cache import AnswerCache, with_cache
from retouch_judge.models import EndpointSettings, JudgeModel, JudgeQuota
from retouch_judge.questions import Answer, JudgeClient, Question

_SEEDS = 10_000  # difference between the seeds of two repeats; larger than any number of answers per question
_UNREADABLE = ("unusable answer", "refusal", "unreadable reply")


@dataclass(frozen=True, slots=True, eq=False)
class ProbeScores:
    """The combined scores of an item's probes: for each name, the scores of its repeats; NaN if the judge gave no score."""

    item: Item
    scores: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True, eq=False)
class JudgeAnswer:
    """An answer of the judge: the index of its question (the same for all seeds), its length in characters, and its mean score."""

    question: int
    length: int
    score: float


@dataclass(slots=True)
class Spending:
    """The totals of the answers in the ledger. ``attempts``: number of requests by fault, "" for a usable answer. ``cost``: None if
    no price is known."""

    attempts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: int = 0
    cost: float | None = None

    @property
    def faults(self) -> str:
        """The three most common faults of requests, in words."""
        wrong = Counter({fault: count for fault, count in self.attempts.items() if fault})
        return ", ".join(f"{count} {fault}" for fault, count in wrong.most_common(3))

    @property
    def received(self) -> int:
        """The number of requests that the judge answered, whether the answer was usable or not."""
        return self.attempts[""] + self.unreadable

    @property
    def unreadable(self) -> int:
        """The number of answers from which no score could be read."""
        return sum(count for fault, count in self.attempts.items() if fault in _UNREADABLE)


@dataclass(frozen=True, slots=True, eq=False)
class AuditAnswers:
    """The result of ``ask``. ``left``: number of items that were not scored because the budget was spent."""

    scored: Sequence[ProbeScores]
    answers: Sequence[JudgeAnswer]
    spending: Spending
    left: int


class _RepeatedClient:
    """Asks each repeat with different seeds, and records the answers. It wraps the client that uses the ledger."""

    def __init__(self, client: JudgeClient, asking: "_Asking") -> None:
        self.client = client
        self.identity = client.identity
        self._asking = asking

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        shift = _SEEDS * self._asking.repeat
        answers = self.client.ask([replace(question, seed=question.seed + shift) for question in questions])
        for question, answer in zip(questions, answers, strict=True):
            if answer.scores:
                # ids are unique because the items keep the images alive
                parts = tuple(part if isinstance(part, str) else id(part) for part in question.parts)
                number = self._asking.questions.setdefault((question.rubric, parts), len(self._asking.questions))
                score = sum(answer.scores.values()) / len(answer.scores)
                self._asking.answers.append(JudgeAnswer(number, len(answer.text), score))
        return answers

    def close(self) -> None:
        close(self.client)


@dataclass(slots=True)
class _Asking:
    """The index of the current repeat, the answers that have scores so far, and the index of each question."""

    repeat: int = 0
    answers: list[JudgeAnswer] = field(default_factory=list)
    questions: dict[tuple[str, tuple[object, ...]], int] = field(default_factory=dict)

    def kept(self, reward: Reward, cache: AnswerCache) -> Reward:
        """Wrap the reward with the ledger, and with different seeds for each repeat."""
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

    def open(self, model: JudgeModel) -> Any:
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
) -> AuditAnswers:
    """Score every rung ``repeats`` times and every probe once, item by item.

    ``combined``: returns the combination that is audited. ``ledger``: the file that stores the answers. ``clients``: opens the
    clients of the judge. ``progress``: called with the number of finished items and of all items. Raises ValueError if the ledger
    belongs to another judge, if no image of the first item got a score, or if the reward raises it.
    """
    asking = _Asking()
    scored: list[ProbeScores] = []
    grouped = any(getattr(part, "compares_groups", False) for _, _, part in section.parts())
    with closing(Database(ledger)) as database:
        cache = AnswerCache(database)
        reward = section.build(device=device, clients=clients, keep=lambda made: asking.kept(made, cache))
        try:
            own, about = short(describe(reward)), json.dumps(describe(reward), sort_keys=True)
            with database.writing() as connection:
                known = [row[0] for row in connection.execute("SELECT fingerprint FROM judges")]
                if not known:
                    connection.execute("INSERT INTO judges (fingerprint, about, since) VALUES (?, ?, 0)", (own, about))
            if known and own not in known:
                raise ValueError(
                    f"{database.path} has the answers of another judge, or of other settings; give another folder with --out"
                )
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
    return AuditAnswers(scored, asking.answers, spending, len(items) - len(scored))


def _score_item(
    reward: Reward, combination: Combination, item: Item, asking: _Asking, *, repeats: int, grouped: bool
) -> ProbeScores:
    """Score one item. ``grouped``: the reward compares the images of a group, so only rungs are scored, and no probes."""
    values: dict[str, list[float]] = {}
    for repeat in range(repeats):
        asking.repeat = repeat
        probes = item.rungs if repeat or grouped else (*item.rungs, *item.probes)
        scores = scores_of(
            reward,
            [replace(probe.sample, task=replace(probe.sample.task, id=f"{probe.sample.task.id}#{repeat}")) for probe in probes],
        )
        shares = (combination(scores).double() - combination.low) / (combination.high - combination.low)
        for probe, value in zip(probes, shares.tolist(), strict=True):
            values.setdefault(probe.name, []).append(value)
    return ProbeScores(item, values)


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
