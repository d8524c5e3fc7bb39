"""The queue of the league: Optuna studies in one journal file, on which any number of processes work.

Each contestant has two studies in each world: ``tuning``, whose trials are settings, and ``final``, whose trials are seeds. The
processes may run on several machines that share the folder. Each process holds a lock on its own file while it lives. If it is
killed, the lock is released, and another process repeats its unfinished run.
"""

import fcntl
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import optuna
from contestants import Contestant
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from worlds import FIRST_SEED, Stage, World

SEEDS = (0, 1, 10, 5, 59, 7, 20, 76, 15)
"""Sampler seeds of the first trials, chosen so that the drawn learning rates (2.8e-4, 1.2e-3, 1.2e-4, 2.2e-3, ...) are spread over
the range. Trial 0 draws nothing. The seed of later trials is their number plus 100."""
STARTUP = len(SEEDS)
"""Trials that are drawn at random before the sampler uses the results of earlier trials."""


@dataclass(frozen=True)
class Plan:
    """The number of runs of each contestant: ``trials`` tuning runs, then ``seeds`` final runs with the best settings."""

    trials: int
    seeds: int


@dataclass(frozen=True)
class Job:
    """One run that this process has claimed. ``number``: the number of the trial within its stage."""

    world: World
    contestant: Contestant
    stage: Stage
    number: int
    seed: int
    settings: Mapping[str, float]
    trial: optuna.Trial
    study: optuna.Study

    def finish(self, score: float) -> None:
        """Report the result to the sampler. ``score``: the share of the gap that was closed."""
        self.study.tell(self.trial, score)

    def give_up(self) -> None:
        """Hand the job back, so that another process or a later start runs it."""
        self.study.tell(self.trial, state=TrialState.FAIL)


class Queue:
    """The queue in ``folder``, as a context manager: at the end of the block, claimed jobs that are not finished are free again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "workers").mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self._own = self._locked_file(self.name)
        self._studies: dict[tuple[str, str, Stage], optuna.Study] = {}

    def __enter__(self) -> "Queue":
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close()
        (self.folder / "workers" / self.name).unlink(missing_ok=True)

    def claim(self, worlds: Sequence[World], plan: Plan, *, only: Sequence[str] = ()) -> Job | None:
        """Claim the next run that no process has done or is doing; None if there is none.

        The first trial of every contestant comes first, then the second, and so on, then the first final run of every contestant
        whose trials are complete. ``only``: names of contestants. Search and claim happen under one lock, so two processes never
        claim the same run.
        """
        with self.exclusive():
            for world in worlds:
                chosen = [each for each in world.contestants if not only or each.name in only]
                for stage, length in (("tuning", plan.trials), ("final", plan.seeds)):
                    for number in range(length):
                        for contestant in chosen:
                            job = self._take(world, contestant, stage, number, plan)
                            if job is not None:
                                return job
        return None

    def _take(self, world: World, contestant: Contestant, stage: Stage, number: int, plan: Plan) -> Job | None:
        """Claim trial ``number`` of a stage; None if it is done, running or not ready."""
        study = self._study(world, contestant, stage)
        self._free_stale(study)
        known = [trial.user_attrs for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.FAIL]
        if stage == "tuning":
            settings, seed = None, FIRST_SEED[stage]
            if any(about.get("number") == number for about in known):
                return None
            if number == 0 and not study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
                study.enqueue_trial({knob.name: knob.default for knob in contestant.knobs})
        else:
            settings, seed = self.best(world, contestant, plan), FIRST_SEED[stage] + number
            if settings is None or any((about["number"], about["settings"]) == (number, settings) for about in known):
                return None
        # The sampler's seed depends only on the number of the trial, so that every contestant tries the same learning rates.
        seed_of_draws = SEEDS[number] if number < len(SEEDS) else number + 100
        study.sampler = optuna.samplers.TPESampler(seed=seed_of_draws, n_startup_trials=STARTUP)
        trial = study.ask()
        trial.set_user_attr("worker", self.name)
        if settings is None:
            settings = {knob.name: knob.draw(trial) for knob in contestant.knobs}
        trial.set_user_attr("settings", settings)
        trial.set_user_attr("number", number)
        return Job(world, contestant, stage, number, seed, settings, trial, study)

    def best(self, world: World, contestant: Contestant, plan: Plan) -> Mapping[str, float] | None:
        """The settings of the best trial; None before all trials are complete."""
        study = self._study(world, contestant, "tuning")
        done = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if len(done) < plan.trials:
            return None
        return max(done, key=lambda trial: (trial.value, -trial.number)).user_attrs["settings"]

    def _study(self, world: World, contestant: Contestant, stage: Stage) -> optuna.Study:
        key = (world.name, contestant.name, stage)
        if key not in self._studies:
            self._studies[key] = optuna.create_study(
                study_name="/".join([*key, world.definition(contestant)]),
                storage=self._storage,
                direction="maximize",
                load_if_exists=True,
            )
        return self._studies[key]

    def _free_stale(self, study: optuna.Study) -> None:
        """Mark running trials of dead processes as failed, so that they are run again."""
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if not self._alive(trial.user_attrs.get("worker")):
                study.tell(trial.number, state=TrialState.FAIL)

    def _alive(self, worker: str | None) -> bool:
        if worker is None:
            return False
        if worker == self.name:
            return True
        try:
            self._locked_file(worker).close()
        except BlockingIOError:
            return True
        return False

    def _locked_file(self, worker: str) -> IO[str]:
        """Open and lock the file of a process. Raises BlockingIOError if the process is alive."""
        file = (self.folder / "workers" / worker).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        return file

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock of the queue, so that only one process is inside. The lock is released if the process is killed."""
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
