"""A run from its recipe to its report: start or resume, train, save, evaluate, sum up."""

import logging
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NoReturn

import accelerate.utils

from retouch.assembly.assembly import Assembly, assemble
from retouch.assembly.state import capture, restore
from retouch.distributed.device_memory import DeviceMemory, limit_memory
from retouch.distributed.placement import init_distributed_from_recipe, plan_placement
from retouch.distributed.ranks import Ranks
from retouch.distributed.sharding_checks import check_sharding
from retouch.distributed.stepper import Stepper
from retouch.inference.publishing import Publisher, open_publisher
from retouch.policies.autoregressive.rollout import EngineFault
from retouch.recipe.checks import unmeant_ranks
from retouch.recipe.differences import differences
from retouch.recipe.judge_calls import judge_calls
from retouch.recipe.out_of_memory import named
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.records.libraries import silence_libraries
from retouch.records.trackers import CompositeTracker, open_trackers, require_trackers
from retouch.report.page import write_report
from retouch.rewards.quota.quota import BudgetSpent
from retouch.session.outcome import Outcome
from retouch.session.stopping import StopRequest, listening
from retouch.session.trials import trial_steps
from retouch.training import checkpoint
from retouch.training.ledger import Ledger
from retouch.training.loop import TooManyMissing, train
from retouch.training.preflight import require
from retouch.training.recorder import Recorder
from retouch.watch.alarm_stop import refuse_if_stopped, stop_message, stopping_alarms, write_stop
from retouch.watch.alarms import Alarm, AlarmStop
from retouch.watch.measures import build_measures
from retouch.watch.watcher import Watcher, build_watcher

log = logging.getLogger("retouch")


def run(recipe: Recipe, *, fresh: bool, new_judge: bool = False) -> int:
    """Train as the recipe says, or go on with the run of its name. Returns the process's exit code.

    ``new_judge``: it may go on with another judge than it had.
    0: done. 128 + a signal's number: stopped on request, with a checkpoint. ValueError: nothing was started, or the run stopped on
    a fault that its message names, with a checkpoint of the last good step.
    """
    require_trackers(recipe.trackers)
    check_sharding(recipe, os.environ)
    ranks = init_distributed_from_recipe(recipe)
    folder = RunFolder(recipe.folder)
    _open_folder(folder, recipe, ranks, fresh=fresh, new_judge=new_judge)
    _log_to(folder, ranks)
    shared = f", which share by {recipe.sharding}" if recipe.sharding is not None and ranks.world > 1 else ""
    where = f"{ranks.device}, {ranks.world} rank{'s' * (ranks.world > 1)}{shared}"
    log.info("run %s on %s; folder %s", recipe.name, where, folder.root)
    if (unmeant := unmeant_ranks(recipe, ranks.world)) is not None:
        log.warning("%s", unmeant)
    accelerate.utils.set_seed(recipe.seed)  # nothing of ours draws from the global generators; a user's reward may
    limit_memory(recipe.devices, plan_placement(recipe, ranks))
    publisher = open_publisher(recipe, folder, first=ranks.is_main)
    keep_images = recipe.ledger is not None and recipe.ledger.keep_images
    with closing(Ledger(folder.root, ranks, keep_images=keep_images, new_judge=new_judge)) as ledger:
        with named(recipe, lambda: "loading"):
            measures = None if recipe.watch is None else build_measures(recipe.watch, device=ranks.device, cached=ledger.cached)
            parts = assemble(recipe, ranks, ledger=ledger)
        for test_set in dict.fromkeys(test_set for sets in parts.sets for test_set in sets.test_sets):
            log.warning("trains on a known test set, as the recipe allows: %s", test_set)
        if recipe.eval.split == "train":
            log.warning("nothing is held out: the run is judged by the tasks that train, which measures fit and no gain")
        for calls in judge_calls(recipe, steps=[len(steps) for _, steps in parts.plan], heldout=len(parts.sets[0].heldout)):
            log.info("%s", calls)
        with listening() as request, named(recipe, lambda: parts.clock.stage or "evaluation"):
            watcher = None
            if measures is not None and recipe.watch is not None:
                refuse_if_stopped(folder, recipe.watch, columns=parts.judge.reward.columns, ranks=ranks)
                watcher = build_watcher(parts, folder, measures)
            return _Session(recipe, folder, parts, ledger, watcher, publisher, request).run()


def _open_folder(folder: RunFolder, recipe: Recipe, ranks: Ranks, *, fresh: bool, new_judge: bool) -> None:
    """Make the folder, or check that what lies there may go on under this recipe; rank 0 writes."""
    if folder.recipe.exists() and not fresh:
        changed = differences(parse(folder.read_recipe()["recipe"]), recipe, new_judge=new_judge)
        if changed:
            listed = "\n  ".join(changed)
            raise ValueError(
                f"{folder.root} holds a run of another recipe:\n  {listed}\n"
                "Give this one another name, or set the old one aside with --fresh"
            )
    ranks.barrier()
    if ranks.is_main:
        if fresh and folder.recipe.exists():
            log.info("the old run is now %s", folder.set_aside())
        folder.create()
        folder.write_recipe(recipe.document())
        checkpoint.tidy(folder.checkpoints)
    ranks.barrier()


def _log_to(folder: RunFolder, ranks: Ranks) -> None:
    """Lines with the time to the rank's log file; on rank 0 bare lines to the terminal too."""
    for handler in [*log.handlers]:
        log.removeHandler(handler)
        handler.close()
    file = logging.FileHandler(folder.log(ranks.rank))
    file.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    log.addHandler(file)
    if ranks.is_main:
        log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel(logging.INFO)
    log.propagate = False
    silence_libraries()


@dataclass
class _Session:
    recipe: Recipe
    folder: RunFolder
    parts: Assembly
    ledger: Ledger
    watcher: Watcher | None
    publisher: Publisher | None
    request: StopRequest

    def run(self) -> int:
        found = checkpoint.latest(self.folder.checkpoints)
        if found is None and any(self.folder.checkpoints.glob("step-*")):
            raise ValueError(
                f"no checkpoint in {self.folder.checkpoints} is whole; restore one from elsewhere, or start anew with --fresh"
            )
        state = None if found is None else checkpoint.load(found)
        self.done = 0 if state is None else state.step
        self.memory = DeviceMemory(self.parts.ranks, self.parts.placement, self.recipe.devices)
        stepper = self.parts.stepper()
        if state is not None:
            restore(self.parts, state, stepper)
            if self.done >= self.parts.steps and self.folder.summary.exists():
                log.info("this run is done: %s. More `steps` extend it, --fresh starts it anew", self.folder.report)
                return 0
            log.info("resumed after step %d", self.done)
        if self.parts.ranks.is_main:
            self.folder.truncate_after(self.done)
        self.parts.ranks.barrier()
        self.trackers = self._trackers()
        self.ledger.attach(self.parts.judge, since=self.done)
        self.outcome = Outcome(self.recipe, self.folder, self.parts)
        self.recorder = Recorder(self.folder, self.trackers, total=self.parts.steps, pictured_groups=self.recipe.samples.groups)
        try:
            return self._train(stepper)
        finally:
            if self.publisher is not None:
                self.publisher.close()
            self.trackers.close()
            self.parts.judge.close()
            if self.watcher is not None:
                self.watcher.measures.close()

    def _train(self, stepper: Stepper) -> int:
        if self.done < self.parts.steps:
            self._preflight(stepper)
        if self.done == 0:
            self._heldout(baseline=True)
        if self.watcher is not None:
            self.watcher.open(self.ledger, self.parts.judge, done=self.done)
            if self.watcher.watch.rolls_back and self.done == 0:
                self._save(stepper)
        for index, (resolved, steps) in enumerate(self.parts.plan):
            if self.done >= steps.stop:
                continue
            if self.done == steps.start:
                self.parts.begin(index)
                if index and not resolved.keep_optimizer:
                    stepper = self.parts.stepper()
            run, phase = self.parts.phase(index, stepper=stepper, judge=self.parts.judge.for_split("train"))
            log.info("phase %s: steps %d to %d", phase.name, steps.start + 1, steps.stop)
            try:
                self.recorder.resume_clock()
                for step, collected, metrics in train(run, phase, start=self.done):
                    self.done = step + 1
                    if self._after(stepper, phase.name, collected, metrics):
                        return self.request.code
            except (TooManyMissing, BudgetSpent):
                # Alarm on every rank, before any weight changed; the next start asks the judge again.
                self._save(stepper)
                self.parts.judge.forget_missing("train", self.done)
                raise
            except EngineFault:
                # The same, before the step's rows were whole.
                self._save(stepper)
                raise
        self._save(stepper)
        if self.publisher is not None:
            self.publisher.after(self.parts, self.done, last=True)
        self._heldout(baseline=False)
        self.outcome.sum_up(self.done)
        if self.parts.ranks.is_main:
            self._report()
        return 0

    def _after(self, stepper: Stepper, phase: str, collected: Any, metrics: dict[str, float]) -> bool:
        """Record the step, save and evaluate when due; True if the run was asked to stop. Raises AlarmStop."""
        alarms: list[Alarm] = []
        if self.watcher is not None:
            try:
                with self.parts.clock("watch"):
                    seen, alarms = self.watcher.after(self.done, collected)
            except BudgetSpent:  # on every rank; what was learned from has its line all the same
                self._record(phase, collected, metrics)
                raise
            metrics = {**metrics, **seen}
        self._record(phase, collected, metrics)
        if stopping_alarms(alarms):
            self._end(stepper, stopping_alarms(alarms))
        first = self.parts.ranks.is_main
        last = self.done == self.parts.steps
        # Evaluated before saved: a run killed in between goes back to an older checkpoint and loses nothing of either.
        if not last and _due(self.done, self.recipe.eval.every):
            self._heldout(baseline=False)
        if first and not last and _due(self.done, self.recipe.samples.every):
            self._report()
        stopping = self.parts.ranks.any(self.request.signal is not None) and not last
        if stopping or (not last and _due(self.done, self.recipe.checkpoints.every)):
            self._save(stepper)
        if self.publisher is not None and not last:
            self.publisher.after(self.parts, self.done, last=False)
        if stopping:
            log.info("stopped after step %d; the same command goes on from there", self.done)
            return True
        self.recorder.resume_clock()
        return False

    def _record(self, phase: str, collected: Any, metrics: dict[str, float]) -> None:
        seconds = self.parts.clock.take() | self.memory.after_step(self.done)
        if self.parts.ranks.is_main:
            self.recorder.step(self.done, phase, metrics, seconds)
            if _due(self.done, self.recipe.samples.every):
                self.recorder.groups(self.done, collected)

    def _end(self, stepper: Stepper, found: list[Alarm]) -> NoReturn:
        """Stop with a checkpoint of this step, or at the newest one there is, which is from before the alarm."""
        back_to = None
        if any(one.response == "roll_back" for one in found):
            newest = checkpoint.latest(self.folder.checkpoints)
            assert newest is not None, "there is one of the start"
            back_to = checkpoint.load(newest).step
        else:
            self._save(stepper)
        if self.parts.ranks.is_main:
            write_stop(self.folder, found, step=self.done, back_to=back_to)
            self._report()
        raise AlarmStop(stop_message(found, step=self.done, back_to=back_to))

    def _preflight(self, stepper: Stepper) -> None:
        with named(self.recipe, lambda: "trial step"):
            checks = list(trial_steps(self.parts, stepper=stepper, judge=self.parts.judge.for_split("train"), done=self.done))
        if self.parts.ranks.is_main:
            self.folder.write_preflight([check.to_json() for check in checks])
        for check in checks:
            log.info("preflight  %s  %s", "ok    " if check.ok else "FAILED", check.text)
        require(checks)

    def _heldout(self, *, baseline: bool) -> None:
        """Evaluate on the held-out tasks; before training also what stands beside it."""
        evaluated = self.outcome.evaluate(self.done)
        if baseline:
            self.outcome.baselines()
        if self.parts.ranks.is_main:
            self.recorder.heldout(self.done, evaluated)
            for line in self.outcome.table(self.done):
                log.info(line)

    def _report(self) -> None:
        log.info("report: %s", write_report(self.folder.root))

    def _save(self, stepper: Stepper) -> None:
        state = capture(self.parts, stepper, step=self.done)
        if self.parts.ranks.is_main:
            checkpoint.save(self.folder.checkpoints, state)
            kept = self.recipe.checkpoints
            checkpoint.prune(self.folder.checkpoints, kept.keep, keep_every=kept.keep_every)
        self.parts.ranks.barrier()

    def _trackers(self) -> CompositeTracker:
        if not self.parts.ranks.is_main:
            return CompositeTracker([])
        return open_trackers(
            self.recipe.trackers, self.folder, project="retouch", recipe=self.recipe.document(), first_step=self.done + 1
        )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
