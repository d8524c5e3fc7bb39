"""Starts a run: opens its folder and builds its parts from the recipe. ``training_session`` runs its steps.

Modules that only some recipes need (``watch``, ``push``, judges) are imported where they are used.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

import accelerate.utils

from retouch.assembly.assembly import Assembly, assemble
from retouch.assembly.hooks import Hook, refuse_if_stopped
from retouch.distributed.placement import check_sharding, init_distributed_from_recipe, limit_memory, plan_placement
from retouch.recipe.checks import rank_count_warning
from retouch.recipe.recipe import Recipe
from retouch.recipe.reward_checks import rewards_of
from retouch.records.libraries import require_trackers
from retouch.rewards.worker import explained_by_settings
from retouch.session.interruptions import StopRequest, catch_stop_signals, explain_full_disk, explain_out_of_memory
from retouch.session.run_folder import run_folder
from retouch.session.training_session import TrainingSession
from retouch.training.ledger import Ledger

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
) -> Iterator[TrainingSession]:
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
        if (warning := rank_count_warning(recipe, ranks.world)) is not None:
            log.warning("%s", warning)
        accelerate.utils.set_seed(recipe.seed)  # Retouch does not use the global generators, but a user's reward may
        limit_memory(recipe.devices, plan_placement(recipe, ranks))
        found: list[Hook] = []
        if recipe.eval.suites:
            from retouch.session.suites import RunSuites

            found.append(RunSuites(recipe, folder, ranks))
        if recipe.push is not None:
            from retouch.inference.publishing import open_publisher

            publisher = open_publisher(recipe, folder, is_main=ranks.is_main)
            found += [] if publisher is None else [publisher]
        keep_images = recipe.ledger is not None and recipe.ledger.keep_images
        another_judge = new_judge or ((folder.root / "ledger.sqlite").exists() and not folder.has_steps())
        with closing(Ledger(folder.root, ranks, keep_images=keep_images, new_judge=another_judge)) as ledger:
            with explain_out_of_memory(recipe, lambda: "loading"):
                if recipe.watch is not None:
                    from retouch.watch.watcher import Watcher

                    found.insert(0, Watcher(recipe, folder, ranks, ledger))
                resumed = folder if folder.has_steps() else None
                parts = assemble(recipe, ranks, ledger=ledger, resumed=resumed)
            _log_plan(recipe, parts)
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


def _log_plan(recipe: Recipe, parts: Assembly) -> None:
    """Log warnings and costs before the first step: known test sets, evaluation on training tasks, the number of judge calls."""
    for test_set in dict.fromkeys(test_set for sets in parts.sets for test_set in sets.test_sets):
        log.warning("the run trains on a known test set, which the recipe allows: %s", test_set)
    if recipe.eval.split == "train":
        log.warning("eval.split is train: evaluation on the training tasks measures fit, not generalisation")
    if any(part.asks_judge for _, part in rewards_of(recipe)):
        from retouch.recipe.derived.judge_calls import judge_calls

        for calls in judge_calls(recipe, steps=[len(steps) for _, steps in parts.plan], heldout=len(parts.sets[0].heldout)):
            log.info("%s", calls)
