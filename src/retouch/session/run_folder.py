"""Opening the folder of a run: one owner, the same recipe, and nothing lost since the run was here last."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from retouch.config import consent
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder, own
from retouch.records.libraries import silence_libraries
from retouch.records.ownership import NotOwner, shared_owner
from retouch.training import checkpoint

log = logging.getLogger("retouch")


@contextmanager
def run_folder(recipe: Recipe, ranks: Ranks, *, fresh: bool, new_judge: bool, own_process: bool = True) -> Iterator[RunFolder]:
    """The run's folder, which the main rank owns inside the block; other ranks share the ownership if a launcher has it.

    ``fresh``: rename an existing folder first. ``own_process``: the log also goes to the terminal, and no longer to the loggers of
    others. Raises ValueError, on every rank, if another process owns the folder or it holds a run of another recipe.
    """
    with ExitStack() as closing:
        folder, aside, refusal = RunFolder(recipe.folder), None, None
        try:
            if ranks.is_main:
                folder, aside = own(recipe.folder, fresh=fresh, environment=os.environ)
            else:
                folder = RunFolder(recipe.folder, shared_owner(recipe.folder, os.environ))
        except NotOwner as error:
            refusal = error
        if folder.owner is not None:
            closing.callback(folder.owner.close)
        if ranks.any(refusal is not None):
            raise refusal or NotOwner(f"{recipe.folder} is in use, as the message of rank 0 says")
        _require_same_recipe(folder, recipe, new_judge=new_judge)
        ranks.barrier()
        if ranks.is_main:
            folder.create()
            folder.write_recipe(recipe.document())
            consent.remember(recipe.document())
            checkpoint.remove_leftovers(folder.checkpoints)
        ranks.barrier()
        closing.enter_context(_logging(folder, ranks, own_process=own_process))
        if aside is not None:
            log.info("the old run is now %s", aside)
        try:
            yield folder
        except (OSError, ValueError):
            folder.require_owner()  # a folder that was moved away explains every file that is missing
            raise


def _require_same_recipe(folder: RunFolder, recipe: Recipe, *, new_judge: bool) -> None:
    if not folder.recipe.exists():
        return
    from retouch.recipe.differences import differences

    changed = differences(parse(folder.read_recipe()["recipe"]), recipe, new_judge=new_judge)
    if changed:
        listed = "\n  ".join(changed)
        raise ValueError(
            f"{folder.root} contains a run of another recipe:\n  {listed}\n"
            "Give this run another name, or rename the old one with --fresh"
        )


@contextmanager
def _logging(folder: RunFolder, ranks: Ranks, *, own_process: bool) -> Iterator[None]:
    """Log to the rank's log file with times; in a process of the run's own, on the main rank also to the terminal without times."""
    file = logging.FileHandler(folder.log(ranks.rank))
    file.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
    if own_process:
        for handler in [*log.handlers]:
            log.removeHandler(handler)
            handler.close()
        if ranks.is_main:
            log.addHandler(logging.StreamHandler(sys.stdout))
        log.propagate = False
        silence_libraries()
    log.addHandler(file)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        if not own_process:
            log.removeHandler(file)
            file.close()
