"""The hooks of a run: what it does after its steps besides training, such as measurements, suites, the report and callbacks.

A run has one ordered list of them. Some measure the policy and raise alarms; an alarm may stop the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from retouch.distributed.ranks import Ranks
    from retouch.recipe.keys import Response
    from retouch.records.folder import RunFolder
    from retouch.run.build import Assembly
    from retouch.run.evaluation import EvaluationResult
    from retouch.run.step import Metrics, ScoredRollout


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm. ``rule``: the rule's key in ``watch``, or "suite NAME" for a suite of ``eval.suites``. ``text``: a sentence with
    the measured numbers. ``response``: the rule's ``on_alarm`` in the recipe."""

    rule: str
    text: str
    response: Response

    @property
    def key(self) -> str:
        """The rule's key in the recipe, for messages."""
        return f"eval.suites, {self.rule}" if self.rule.startswith("suite ") else f"watch.{self.rule}"


class AlarmStop(ValueError):
    """An alarm of ``watch`` or ``eval.suites`` stopped the run."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """A finished training step. ``step``: its number, from 1. ``steps``: the number of steps of the run. ``metrics``: the metrics
    that ``metrics.jsonl`` stores. ``alarms``: the alarms that this step raised. ``shown``: whether samples of this step are stored.
    """

    step: int
    steps: int
    phase: str
    metrics: Metrics
    alarms: list[Alarm] = field(default_factory=list)
    shown: bool = False


class Hook:
    """Acts after the steps of a run. Every rank calls its hooks, in the order of the run's list. The base class does nothing.

    ``station``: when ``after_step`` is called. "measure": before the step is recorded; it may add metrics and alarms. "recorded":
    after that. "evaluated": after the alarms and the evaluation, if one is due. "saved": after the checkpoint, if one is due.
    ``rolls_back``: whether an alarm of this hook may roll the run back to a checkpoint.
    """

    station: ClassVar[Literal["measure", "recorded", "evaluated", "saved"]] = "recorded"
    rolls_back: bool = False

    def attach(self, parts: Assembly) -> None:
        """Called once when the models are loaded, before any step."""

    def stored_alarms(self, step: int) -> Sequence[Alarm]:
        """Return the alarms that the recipe's present rules raise on what is stored after ``step`` steps."""
        return ()

    def resumed(self, step: int) -> None:
        """Called before the first step if the run was already trained for ``step`` steps; the records in its folder end there. Also
        called if these are all steps of the run."""

    def catch_up(self, step: int) -> Iterator[Alarm]:
        """Measure what is due after ``step`` steps and is not stored, before the first step of this start. Yields its alarms."""
        return iter(())

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        """Called after each step at the hook's station. ``collected``: the samples of the step on this rank."""

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        """Called after the held-out tasks were evaluated at ``step`` finished steps."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """Called after a checkpoint was written to the folder ``checkpoint``."""

    def ended(self, step: int, *, finished: bool) -> None:
        """Called when the run ends after ``step`` steps. ``finished``: these were all its steps, and the last evaluation was made
        or failed; otherwise it was asked to stop, or an alarm stopped it."""

    def close(self) -> None:
        """Called at the end of the process's part in the run, also after an error."""


def stopping_alarms(alarms: Sequence[Alarm]) -> list[Alarm]:
    """Return the alarms whose response stops the run."""
    return [alarm for alarm in alarms if alarm.response != "note"]


def write_stop(folder: RunFolder, alarms: Sequence[Alarm], *, step: int, back_to: int | None) -> None:
    """Record why the run stopped after ``step`` steps. ``back_to``: the step to which it was rolled back; None: no roll-back.

    Call this last: a run that was killed before must not look like a stopped one.
    """
    records = [{"rule": alarm.rule, "text": alarm.text, "response": alarm.response} for alarm in alarms]
    folder.write_alarm({"step": step, "back_to": back_to, "alarms": records})


def stop_message(alarms: Sequence[Alarm], *, step: int, back_to: int | None) -> str:
    """Return the message for the user."""
    state = (
        f"The checkpoint of step {step} is saved"
        if back_to is None
        else f"The run is back in the state of step {back_to}, before the alarm; later records are kept for inspection"
    )
    lines = "\n".join(f"  {alarm.key}: {alarm.text}" for alarm in alarms)
    return f"stopped by an alarm after step {step}:\n{lines}\n{state}. To continue, relax the rule and run the same command"


def refuse_if_stopped(folder: RunFolder, alarms_at: Callable[[int], Sequence[Alarm]], *, ranks: Ranks) -> None:
    """Raise AlarmStop if an alarm stopped the run and would stop it again under the recipe's current rules.

    Otherwise the run may continue, and the record of the stop is deleted. ``alarms_at``: maps a number of steps to the alarms that
    the current rules raise after them. Call this before later records are deleted from the run's folder.
    """
    record = folder.read_alarm()
    if record is None:
        return
    alarms = stopping_alarms(alarms_at(record["step"]))
    if alarms:
        raise AlarmStop(f"{folder.root} was {stop_message(alarms, step=record['step'], back_to=record['back_to'])}")
    ranks.barrier()
    if ranks.is_main:
        folder.alarm.unlink()
