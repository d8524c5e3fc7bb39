"""A run from its recipe to its end: opens its folder, builds its parts, and trains, saves, evaluates and summarises.

Modules that only some recipes need (``watch``, ``push``, judges) and trackers are imported where they are used.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass

import accelerate.utils
import torch

from retouch.config import wings
from retouch.core.intervals import FEWEST, cluster_numbers
from retouch.data.tasks import UnindexedTasks
from retouch.distributed.optimizer import Stepper
from retouch.distributed.ranks import (
    DeviceMemory,
    Ranks,
    check_sharding,
    init_distributed_from_recipe,
    limit_memory,
    plan_placement,
)
from retouch.objectives.advantages import GroupAdvantage
from retouch.policies.engine import EngineFault
from retouch.recipe.recipe import Recipe, rank_count_warning, rewards_of
from retouch.records.control import ControlRequest, answer_request, read_requests
from retouch.records.folder import RunFolder, split_label
from retouch.records.libraries import require_trackers
from retouch.records.ownership import NotOwner
from retouch.rewards.base import BudgetSpent
from retouch.rewards.worker import explained_by_settings
from retouch.run import checkpoint
from retouch.run.build import Assembly, assemble
from retouch.run.checkpoint import GROUPS
from retouch.run.evaluation import RunEvaluations
from retouch.run.folder import StopRequest, catch_stop_signals, explain_full_disk, explain_out_of_memory, newest_state, run_folder
from retouch.run.hooks import Alarm, AlarmStop, Hook, StepResult, refuse_if_stopped, stop_message, stopping_alarms, write_stop
from retouch.run.ledger import Ledger, record_identity
from retouch.run.preflight import require_passed
from retouch.run.recorder import Recorder, SampleDetails
from retouch.run.step import RewardFailed, RewardsAbandoned, ScoredRollout, TooManyMissing, train

log = logging.getLogger("retouch")


def run(recipe: Recipe, *, fresh: bool, new_judge: bool = False) -> int:
    """Train as the recipe says, or resume the run with its name. Returns the exit code of the process.

    ``fresh``: rename an existing run with this name and start from the beginning. ``new_judge``: the run may resume with another
    judge. The exit code is 0 when the run is finished, and 128 + the signal's number when it was stopped on request, with a
    checkpoint. Raises ValueError if the run could not start (for example, because another process owns its folder), or if it
    stopped because of an error that the message names. If too many scores were missing, a budget was spent or an engine failed, the
    last finished step is saved first; after other errors (such as NonFiniteGradient), the run resumes from its newest checkpoint.
    So it does if an alarm may roll it back and a budget was spent while ``watch`` or a suite measured the step.
    """
    with open_session(recipe, fresh=fresh, new_judge=new_judge) as session:
        for _ in session.steps():
            pass
        return session.code


@contextmanager
def open_session(
    recipe: Recipe, *, fresh: bool, new_judge: bool = False, hooks: Sequence[Hook] = (), own_process: bool = True
) -> "Iterator[TrainingSession]":
    """Open a run that is ready to train: open its folder and build its parts. Closes everything at the end of the block.

    ``fresh``, ``new_judge``: see ``run``. ``hooks``: called after those that the recipe asks for. ``own_process``: the
    process belongs to the run, like the process of ``retouch train``: signals stop the run, and the log goes to the terminal and is
    not passed to parent loggers. Raises ValueError like ``run``.
    """
    require_trackers(recipe.trackers)
    check_sharding(recipe, os.environ)
    ranks = init_distributed_from_recipe(recipe)
    opened_folder = run_folder(recipe, ranks, fresh=fresh, new_judge=new_judge, own_process=own_process)
    with explain_full_disk(recipe), opened_folder as folder:
        waits = ", weights wait in CPU memory" if recipe.devices is not None and recipe.devices.weights is not None else ""
        sharding = f" with {recipe.sharding}{waits}" if recipe.sharding is not None and ranks.world > 1 else ""
        where = f"{ranks.device}, {ranks.world} rank{'s' * (ranks.world > 1)}{sharding}"
        log.info("run %s on %s; folder %s", recipe.name, where, folder.root)
        if recipe.ranks not in (None, ranks.world):
            log.warning("%s", rank_count_warning(recipe.ranks, ranks.world))
        accelerate.utils.set_seed(recipe.seed)  # Retouch does not use the global generators, but a user's reward may
        limit_memory(recipe.devices, plan_placement(recipe, ranks))
        found: list[Hook] = []
        if recipe.eval.suites:
            found.append(wings.load("hook.suites")(recipe, folder, ranks))
        if recipe.push is not None:
            publisher = wings.load("hook.push")(recipe, folder, is_main=ranks.is_main)
            found += [] if publisher is None else [publisher]
        keep_images = recipe.ledger is not None and recipe.ledger.keep_images
        another_judge = new_judge or ((folder.root / "ledger.sqlite").exists() and not folder.has_steps())
        with closing(Ledger(folder.root, ranks, keep_images=keep_images, new_judge=another_judge)) as ledger:
            with explain_out_of_memory(recipe, lambda: "loading"):
                if recipe.watch is not None:
                    from retouch.run.watch import Watcher

                    found.insert(0, Watcher(recipe, folder, ranks, ledger))
                resumed = folder if folder.has_steps() else None
                parts = assemble(recipe, ranks, ledger=ledger, resumed=resumed)
            for test_set in dict.fromkeys(test_set for sets in parts.sets for test_set in sets.test_sets):
                log.warning("the run trains on a known test set, which the recipe allows: %s", test_set)
            if recipe.eval.split == "train":
                log.warning("eval.split is train: evaluation on the training tasks measures fit, not generalisation")
            if any(part.asks_judge for _, part in rewards_of(recipe)):
                judge_calls = wings.load("part.judge_calls")
                for calls in judge_calls(recipe, steps=[len(steps) for _, steps in parts.plan], heldout=len(parts.sets[0].heldout)):
                    log.info("%s", calls)
            request = StopRequest(ranks.stop)
            catching = catch_stop_signals(request, answer=ranks.is_main) if own_process else nullcontext()
            explaining = explain_out_of_memory(recipe, lambda: parts.clock.stage or "evaluation")
            with catching, explaining, explained_by_settings():
                for hook in (found := [*found, *hooks]):
                    hook.attach(parts)
                measuring = [hook for hook in found if hook.station == "measure"]  # the same on all ranks
                if measuring:
                    refuse_if_stopped(
                        folder, lambda step: [each for hook in measuring for each in hook.stored_alarms(step)], ranks=ranks
                    )
                yield TrainingSession(recipe, folder, parts, ledger, found, request)


_EQUAL_STEPS = 5
_CONTRAST_STEP, _CONTRAST = 10, 1e-5  # squared distance of velocities, whose own square is about 1


@dataclass
class TrainingSession:
    """A run that is ready to train. ``done``: the number of finished steps. ``code``: the exit code for ``retouch train``."""

    recipe: Recipe
    folder: RunFolder
    parts: Assembly
    ledger: Ledger
    hooks: Sequence[Hook]
    request: StopRequest
    done: int = 0
    code: int = 0
    equal_steps: int = 0
    """Number of successive steps, up to the last one, in which the samples of each group had the same reward."""

    def steps(self) -> Iterator[StepResult]:
        """Train, and yield each step after it was recorded and, if due, evaluated and saved.

        If the caller stops iterating, a checkpoint of the last step is saved. Raises ValueError like ``run``.
        """
        state = newest_state(self.folder, every=self.recipe.checkpoints.every)
        self.done = 0 if state is None else state.step
        stepper = self.parts.stepper()
        if state is not None:
            self.parts.restore(state, stepper)
            if self.done >= self.parts.steps and self._has_summary():
                log.info("this run is done: %s. Raise `steps` to extend it, or start over with --fresh", self.folder.report)
                for hook in self.hooks:
                    hook.resumed(self.done)
                return
            log.info("resumed after step %d", self.done)
            if self.ledger.is_new and self.parts.ranks.is_main:
                log.warning("the run's ledger is missing: images are judged again, and `retouch ledger` knows only later steps")
        if self.parts.ranks.is_main:
            for note in self.folder.truncate_after(self.done):
                log.warning("%s", note)
        self.parts.ranks.barrier()
        self.ledger.attach(self.parts.judge, since=self.done)
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.callback(hook.close)
            stack.callback(self.parts.judge.close)
            stack.callback(self.parts.close_engines)
            for sets in self.parts.sets:
                if isinstance(sets.train, UnindexedTasks):
                    stack.callback(sets.train.close)
            if self.done < self.parts.steps:
                self._preflight(stepper)
            if self.parts.ranks.is_main and (self.done == 0 or not self.folder.identity.exists()):
                record_identity(self.folder, self.parts.base_hashes(), self.parts.sets)
            # Opened after the preflight, so that a run that cannot learn does not appear in a tracker.
            from retouch.records.trackers import CompositeTracker, open_trackers

            opened = CompositeTracker([])
            if self.parts.ranks.is_main:
                document = self.recipe.document()
                opened = open_trackers(
                    self.recipe.trackers, self.folder, project="retouch", recipe=document, first_step=self.done + 1
                )
            trackers = stack.enter_context(closing(opened))
            self.memory = DeviceMemory(self.parts.ranks, self.parts.placement, self.recipe.devices)
            self.evaluations = RunEvaluations(self.recipe, self.folder, self.parts, since=self.ledger.judge_since)
            if self.done and self.parts.ranks.is_main:
                for note in self.evaluations.repair(self.done):
                    log.warning("%s", note)
            if state is not None:
                self.parts.ranks.barrier()
                for hook in self.hooks:
                    hook.resumed(self.done)
            chosen = self.recipe.samples
            self.steering = ControlRequests(self.folder, self.parts.ranks, samples_every=chosen.every, step=self.done)
            stack.callback(lambda: self.steering.refuse(self.done, "the run ended"))
            details = None
            if chosen.tokens or chosen.states:
                details = SampleDetails(self.parts.model, tokens=chosen.tokens, states=chosen.states)
            self.recorder = Recorder(self.folder, trackers, total=self.parts.steps, samples=chosen, details=details)
            report = wings.load("hook.report")(self.folder, is_main=self.parts.ranks.is_main)
            stack.callback(report.close)
            self.hooks = [*self.hooks, report]
            self.measuring = False
            try:
                yield from self._train(stepper)
            except RewardsAbandoned:
                newest = checkpoint.latest(self.folder.checkpoints)
                where = "there is no checkpoint yet" if newest is None else f"the checkpoint is {newest}"
                log.warning("stopped before the rewards arrived; %s. Run the same command to continue", where)
                self.code = self.request.code

    def _train(self, stepper: Stepper) -> Iterator[StepResult]:
        if self.done == 0:
            self._heldout(baseline=True)
        else:
            due = self.done < self.parts.steps and _due(self.done, self.recipe.eval.every)
            lacking = due and self.done not in {line["step"] for line in self.folder.read_evals()}
            # The judge is another one from here on, or the run was stopped before the evaluation of its last step.
            if self.done == self.ledger.judge_since or self.parts.ranks.any(lacking):
                self._heldout(baseline=False)
        alarms: list[Alarm] = []
        try:
            for hook in self.hooks:
                alarms.extend(hook.catch_up(self.done))
        except (BudgetSpent, RewardFailed) as error:
            self._stop_for_alarms(stepper, alarms, failure=error)
            raise
        self._stop_for_alarms(stepper, alarms)
        if self.done == 0 and any(hook.rolls_back for hook in self.hooks):
            self._save(stepper)
        for index, (resolved, steps) in enumerate(self.parts.plan):
            if self.done >= steps.stop:
                continue
            if self.done == steps.start:
                self.parts.begin(index)
                if index and not resolved.keep_optimizer:
                    stepper = self.parts.stepper()
            run, phase = self.parts.phase(index, stepper=stepper, judge=self.parts.judge.for_split("train"))
            log.info("phase %s: steps %d to %d", phase.name, self.done + 1, steps.stop)
            try:
                self.recorder.resume_clock()
                for step, collected, metrics in train(run, phase, start=self.done):
                    self.done = step + 1
                    result = StepResult(step=self.done, steps=self.parts.steps, phase=phase.name, metrics=metrics)
                    stopped = self._after(stepper, result, collected)
                    yield result
                    if stopped:
                        self.code = self.request.code
                        return
            except (TooManyMissing, BudgetSpent, RewardFailed):
                # Raised on every rank: before the weights changed again, or while a hook measured this step. If an
                # alarm of this step can still roll the run back, the checkpoint before it must stay the newest. The next start
                # sends the failed samples to the judge again.
                if not (self.measuring and any(hook.rolls_back for hook in self.hooks)):
                    self._save(stepper)
                    log.warning("stopped after step %d, which is saved: the next start continues from it", self.done)
                self.parts.judge.forget_missing("train", self.done)
                raise
            except RewardsAbandoned:
                if not self.measuring:  # otherwise resume from the previous checkpoint and measure again
                    self._save(stepper)
                raise
            except EngineFault:
                # Raised on every rank before the step's rollout was complete.
                self._save(stepper)
                raise
            except GeneratorExit:  # the caller stopped iterating after a step
                self._save(stepper)
                raise
        self._save(stepper)
        try:
            self._heldout(baseline=False)
            self.evaluations.write_summary(self.done)
        finally:  # the weights are pushed even if the evaluation fails
            for hook in self.hooks:
                hook.ended(self.done, finished=True)

    def _after(self, stepper: Stepper, step: StepResult, collected: ScoredRollout) -> bool:
        """Measure and record a step; evaluate and save if due. Returns whether the run stops after it. Raises AlarmStop."""
        self.measuring = True
        try:
            self._call_hooks("measure", step, collected)
        except (BudgetSpent, RewardFailed) as error:  # raised on every rank; the step was taken, so its metrics are recorded
            self._record(step, collected)
            self._stop_for_alarms(stepper, step.alarms, failure=error)
            raise
        self.measuring = False
        self._record(step, collected)
        # Warn once if all samples, or those of each group, have the same reward in several successive steps, or in all steps of a
        # short run.
        equal_groups = isinstance(self.recipe.advantage, GroupAdvantage) and step.metrics.get("group/zero_std_fraction") == 1
        self.equal_steps = self.equal_steps + 1 if equal_groups or step.metrics.get("reward/std") == 0 else 0
        if self.parts.ranks.is_main and self.equal_steps == max(2, min(_EQUAL_STEPS, self.parts.steps)):
            log.warning(
                "the samples of each task had equal rewards in the last %d steps (mean %g), from which the policy cannot learn. "
                "Look at the images: are they all alike? If not, check with `retouch score` that the reward distinguishes them",
                self.equal_steps,
                step.metrics["reward/mean"],
            )
        if self.done == min(_CONTRAST_STEP, self.parts.steps) and step.metrics.get("policy/old_distance", 1.0) < _CONTRAST:
            log.info(
                "the old policy is almost the current one (policy/old_distance %.1e), so the positive and the negative velocity of "
                "DiffusionNFT do not differ: it is advantage-weighted matching here. objective.old_decay makes them differ",
                step.metrics["policy/old_distance"],
            )
        self._call_hooks("recorded", step, collected)
        self._stop_for_alarms(stepper, step.alarms)
        last = self.done == self.parts.steps
        # Evaluate before saving: a run that is killed in between resumes from an older checkpoint and evaluates again.
        if not last and _due(self.done, self.recipe.eval.every):
            self._heldout(baseline=False)
        self._call_hooks("evaluated", step, collected)
        stopping, saving = self.steering.wanted(stop=self.request.pending, last=last)
        stopping = stopping and not last
        if stopping or (not last and (saving or _due(self.done, self.recipe.checkpoints.every))):
            self._save(stepper)
        self.steering.answer(self.done, last=last)
        self._call_hooks("saved", step, collected)
        if stopping:
            for hook in self.hooks:
                hook.ended(self.done, finished=False)
            log.info("stopped after step %d; run the same command to continue", self.done)
        else:
            self.recorder.resume_clock()
        return stopping

    def _call_hooks(self, station: str, step: StepResult, collected: ScoredRollout) -> None:
        for hook in self.hooks:
            if hook.station == station:
                hook.after_step(step, collected)

    def _record(self, step: StepResult, collected: ScoredRollout) -> None:
        seconds = self.parts.clock.take() | self.memory.after_step(self.done) | self.ledger.usage()
        step.shown = _due(self.done, self.steering.samples_every)
        if self.parts.ranks.is_main:
            self.recorder.step(self.done, step.phase, step.metrics, seconds)
            if step.shown:
                self.recorder.groups(self.done, collected)

    def _stop_for_alarms(self, stepper: Stepper, raised: Sequence[Alarm], *, failure: ValueError | None = None) -> None:
        """Raise AlarmStop if one of the alarms stops the run. ``failure``: an error of the same step, which is then only logged.

        The run can then resume from a checkpoint of this step, or, if an alarm rolls back, from the newest existing checkpoint,
        which was saved before the alarm. The only exception: if the rule was set to roll back after the checkpoint of this step was
        saved, that checkpoint stays.
        """
        if not (alarms := stopping_alarms(raised)):
            return
        if failure is not None:
            log.warning("%s", failure)
        back_to = None
        if any(alarm.response == "roll_back" for alarm in alarms):
            newest = checkpoint.load_latest(self.folder.checkpoints, groups=GROUPS)
            assert newest is not None, "a run that may roll back saves a checkpoint at its start"
            back_to = newest.step if newest.step < self.done else None
        else:
            self._save(stepper)
        if self.parts.ranks.is_main:
            write_stop(self.folder, alarms, step=self.done, back_to=back_to)
        for hook in self.hooks:
            hook.ended(self.done, finished=False)
        raise AlarmStop(stop_message(alarms, step=self.done, back_to=back_to))

    def _preflight(self, stepper: Stepper) -> None:
        with explain_out_of_memory(self.recipe, lambda: "trial step"):
            checks = list(self.parts.trial_steps(stepper=stepper, judge=self.parts.judge.for_split("train"), done=self.done))
        if self.parts.ranks.is_main:
            self.folder.write_preflight([asdict(check) for check in checks])
        for check in checks:
            log.info("preflight  %s  %s", "ok    " if check.ok else "FAILED", check.text)
        require_passed(checks)

    def _heldout(self, *, baseline: bool) -> None:
        """Evaluate on the held-out tasks; before training also compute the baselines."""
        evaluated = self.evaluations.evaluate(self.done)
        for hook in self.hooks:
            hook.evaluated(self.done, evaluated)
        if self.parts.ranks.is_main:
            self.recorder.heldout(self.done, evaluated)
            for line in self.evaluations.format_table(self.done):
                log.info(line)
            if baseline and (count := cluster_numbers(evaluated.sources)[1]) < FEWEST:
                log.info(
                    "%d %s tasks from %d sources are too few for an interval, which needs %d sources: raise data.held_out or "
                    "eval.tasks (in Python: data={'held_out': %d}, or more rows in eval_dataset)",
                    *(len(evaluated.tasks), split_label(self.recipe.eval.split), count, FEWEST, FEWEST),
                )
        if baseline:
            self.evaluations.write_baselines()

    def _has_summary(self) -> bool:
        """Whether the summary is readable and not that of fewer steps, which a run has whose ``steps`` was raised."""
        try:
            summary = self.folder.read_summary()
        except ValueError:
            return False
        return summary is not None and summary.steps >= self.done

    def _save(self, stepper: Stepper) -> None:
        state = self.parts.capture(stepper, step=self.done)
        if self.parts.ranks.is_main:
            checkpoint.save(self.folder.checkpoints, state, before_commit=self.folder.require_owner)
            section = self.recipe.checkpoints
            checkpoint.prune(self.folder.checkpoints, section.keep, keep_every=section.keep_every)
            self.folder.write_saved(state.step)
            if not self.folder.recipe.exists():
                log.warning("%s was deleted during the run; it is written again", self.folder.recipe)
                self.folder.write_recipe(self.recipe.document())
        else:
            checkpoint.send(state)
        self.parts.ranks.barrier()
        for hook in self.hooks:
            hook.saved(self.done, self.folder.checkpoints / f"step-{self.done:06d}")


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


_SETTLED_NS = 2_000_000_000


class ControlRequests:
    """Reads the requests to a run and answers them. Without new requests, it costs one ``os.stat`` per step.

    ``samples_every``: the number of steps between stored samples, used by the main rank. A request changes it until the process
    ends. Requests that were made before this process started are refused.
    """

    def __init__(self, folder: RunFolder, ranks: Ranks, *, samples_every: int, step: int) -> None:
        self.samples_every = samples_every
        self._folder, self._ranks = folder, ranks
        self._control = folder.control  # found once, because each look at it examines its path for links
        self._seen = 0
        self._answered: set[str] = set()
        self._waiting: dict[str, ControlRequest] = {}
        self.refuse(step, "the run was not training")

    def wanted(self, *, stop: bool, last: bool) -> tuple[bool, bool]:
        """Return whether new requests ask to stop, and to save a checkpoint; the same on all ranks. ``stop``: whether a signal
        asked this rank to stop. ``last``: whether this is the last step of the run, at which requests have no effect."""
        if self._ranks.is_main:
            self._waiting = self._new()
        for request in () if last else self._waiting.values():
            if request.action == "samples" and request.value is not None:
                self.samples_every = request.value
        actions = set() if last else {request.action for request in self._waiting.values()}
        flags = torch.tensor([float(stop or "stop" in actions), float("checkpoint" in actions)])
        stopping, saving = self._ranks.max(flags).tolist()
        return stopping > 0, saving > 0

    def answer(self, step: int, *, last: bool) -> None:
        """Answer the requests of this step, after the run has carried them out."""
        for name, request in self._waiting.items():
            if last:
                self._write(name, request, taken=False, step=step, answer="this was the last step; the run ends with a checkpoint")
            else:
                every = request.value
                samples = f"samples are stored every {every} steps from now on" if every else "no more samples are stored"
                done = {"stop": f"stopped after step {step}, with a checkpoint", "checkpoint": f"saved a checkpoint of step {step}"}
                self._write(name, request, taken=True, step=step, answer=done.get(request.action, samples))
        self._waiting = {}

    def refuse(self, step: int, why: str) -> None:
        """Refuse every request that has no answer yet."""
        if self._ranks.is_main:
            for name, request in read_requests(self._folder).items():
                if request.taken is None:
                    self._write(name, request, taken=False, step=step, answer=why)

    def _new(self) -> dict[str, ControlRequest]:
        try:
            stamp = os.stat(self._control).st_mtime_ns
        except OSError:
            return {}
        if stamp == self._seen:
            return {}
        # A file that is added within the resolution of the file system's clock does not change the folder's time, so read again.
        self._seen = stamp if abs(time.time_ns() - stamp) > _SETTLED_NS else 0
        found = read_requests(self._folder).items()
        return {name: request for name, request in found if request.taken is None and name not in self._answered}

    def _write(self, name: str, request: ControlRequest, *, taken: bool, step: int, answer: str) -> None:
        log.info("%s requested by %r: %s%s", request.action, request.by, "" if taken else "refused, ", answer)
        self._answered.add(name)
        try:
            answer_request(self._folder, name, request, taken=taken, step=step, answer=answer)
        except (OSError, NotOwner) as error:  # another user may own the file; this must not stop the run
            log.warning("the answer could not be stored: %s", error)
