"""The folder of a run, opened by one owner with one recipe, and what interrupts the run: signals, a full disk, a full device."""

import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import FrameType

import torch

from retouch.config import consent
from retouch.config.keys import RedactingFormatter
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import Recipe, parse
from retouch.records import files
from retouch.records.folder import RunFolder, own, readable_steps, remove_leftovers
from retouch.records.libraries import silence_libraries
from retouch.records.ownership import NotOwner, shared_owner
from retouch.run import checkpoint
from retouch.run.checkpoint import GROUPS, TrainState

_ANSWER = "stopping after this step; a second signal stops at once, and the run then continues from its last checkpoint"


@dataclass
class StopRequest:
    """Whether the run was asked to stop. ``signal``: the first signal received, or None. A second Ctrl-C stops the process at once.

    ``asked``: the event that is set when the run is asked to stop. It also limits the wait for rewards (``Ranks.stop``).
    """

    asked: threading.Event
    signal: int | None = None

    def stop(self) -> None:
        """Ask the run to stop at the end of its step, without a signal."""
        self.asked.set()

    @property
    def pending(self) -> bool:
        """Whether the run was asked to stop."""
        return self.asked.is_set()

    @property
    def code(self) -> int:
        """The exit code after a stop: 128 + the number of the signal (SIGTERM if this rank received no signal)."""
        return 128 + (self.signal or signal.SIGTERM)


@contextmanager
def catch_stop_signals(request: StopRequest, *, answer: bool) -> Iterator[None]:
    """Treat the first SIGINT, SIGTERM or SIGHUP inside the block as a request to stop. An ignored SIGHUP (nohup) stays ignored.

    ``answer``: print a line to stderr when the signal arrives, because a step may take minutes.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = number
        request.stop()
        for each in numbers:
            signal.signal(each, before[each])
        if answer:
            # Not through a stream or a logger: the signal may have interrupted a write to it.
            with suppress(OSError):
                os.write(2, f"{signal.Signals(number).name}: {_ANSWER}\n".encode())

    before = {each: signal.signal(each, note) for each in numbers}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def explain_full_disk(recipe: Recipe) -> Iterator[None]:
    """Turn an OSError of a full disk into ValueError, which says what to do; a library's error may name no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = error.filename or recipe.folder
        raise ValueError(f"{where}: {error.strerror}; free some space and run the same command again") from error


@contextmanager
def explain_out_of_memory(recipe: Recipe, stage: Callable[[], str]) -> Iterator[None]:
    """Turn torch's OutOfMemoryError into OutOfMemory, which names the recipe keys to change. ``stage``: what the run is doing."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        from retouch.recipe.derived_facts import explained

        raise explained(recipe, stage(), str(error)) from error


log = logging.getLogger("retouch")


@contextmanager
def run_folder(recipe: Recipe, ranks: Ranks, *, fresh: bool, new_judge: bool, own_process: bool = True) -> Iterator[RunFolder]:
    """Open the run's folder. The main rank owns it inside the block; other ranks share the ownership if a launcher holds it.

    ``fresh``: rename an existing folder first. ``own_process``: the process belongs to the run: the log also goes to the terminal,
    and is not passed to parent loggers. Raises ValueError, on every rank, if another process owns the folder or the folder contains
    a run of another recipe.
    """
    with ExitStack() as closing:
        folder, aside = RunFolder(recipe.folder), None
        refusal: ValueError | OSError | None = None
        try:
            if ranks.is_main:
                folder, aside = own(recipe.folder, fresh=fresh, environment=os.environ)
                folder.require_files()
            else:
                folder = RunFolder(recipe.folder, shared_owner(recipe.folder, os.environ))
        except FileNotFoundError as error:
            key = "out" if own_process else "output_dir"
            reason = f"{error.filename}: {error.strerror}"
            refusal = ValueError(f"{key}: the folder {recipe.folder} cannot be created ({reason}); choose another folder")
        except (NotOwner, OSError) as error:
            refusal = error
        if folder.owner is not None:
            closing.callback(folder.owner.close)
        if ranks.any(refusal is not None):
            raise refusal or NotOwner(f"{recipe.folder} cannot be used, as the message of rank 0 says")
        _require_same_recipe(folder, recipe, new_judge=new_judge, own_process=own_process)
        ranks.barrier()
        if ranks.is_main:
            folder.create()
            if folder.recipe.exists() and not folder.has_steps():
                folder.discard_attempt()
            folder.write_recipe(recipe.document())
            consent.remember(recipe.document())
            remove_leftovers(folder.root)
        ranks.barrier()
        closing.enter_context(_logging(folder, ranks, own_process=own_process))
        if aside is not None:
            log.info("the old run is now %s", aside)
        try:
            yield folder
        except (OSError, ValueError):
            folder.require_owner()  # if the folder was moved away, raise that instead of the missing file
            raise


def newest_state(folder: RunFolder, *, every: int) -> TrainState | None:
    """Load the newest intact checkpoint of a run; None if the run has not saved one yet. Logs which steps were lost.

    ``every``: the number of steps between checkpoints. Raises ValueError if the run had checkpoints and none of them is intact.
    """
    state = checkpoint.load_latest(folder.checkpoints, groups=GROUPS)
    lost = folder.lost_checkpoints(None if state is None else state.step, every=every)
    if state is None and (lost or any(folder.checkpoints.glob("step-*"))):
        raise ValueError(
            f"{lost or f'all checkpoints in {folder.checkpoints} are damaged'}. Starting at step 0 would delete the records of the "
            "run, so nothing was changed: restore a checkpoint from a backup, or start over with --fresh, which renames the folder"
        )
    if lost:
        log.warning("%s; the steps after it are trained again", lost)
    elif state is None and (lines := len(readable_steps(folder.metrics))):
        log.warning("the run had ended before its first checkpoint: its %d steps are trained again", lines)
    return state


def _require_same_recipe(folder: RunFolder, recipe: Recipe, *, new_judge: bool, own_process: bool) -> None:
    if not folder.recipe.exists():
        if any(folder.checkpoints.glob("step-*")):
            raise ValueError(
                f"{folder.root} has checkpoints and no recipe.json, so they may be of another recipe: restore the file from a "
                "backup, or rename the folder with --fresh"
            )
        return
    from retouch.recipe.derived_facts import differences

    command = "Give this run another name with --set name=NAME, or rename the old one with --fresh"
    script = "Give this run another run_name, or call train(fresh=True), which renames the folder of the old one"
    advice = command if own_process else script
    stored = folder.read_recipe()["recipe"]
    try:
        before = parse(stored)
    except ValueError as error:
        raise ValueError(f"{folder.root} contains a run whose recipe this version cannot read:\n  {error}\n{advice}") from None
    changed = differences(before, recipe, new_judge=new_judge)
    if changed and folder.has_steps():  # a recipe that failed before its first step may be corrected
        listed = "\n  ".join(changed)
        raise ValueError(f"{folder.root} contains a run of another recipe:\n  {listed}\n{advice}")


class _LogFile(logging.FileHandler):
    """Appends to a log in a run's folder."""

    def _open(self) -> TextIOWrapper:
        handle = files.open_handle(Path(self.baseFilename), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return os.fdopen(handle, "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """Print no traceback for each line that a full disk does not take; the next file of the run ends it with a message."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def _logging(folder: RunFolder, ranks: Ranks, *, own_process: bool) -> Iterator[None]:
    """Log to the rank's log file with times. With ``own_process``, the main rank also logs to the terminal, without times."""
    file = _LogFile(folder.log(ranks.rank))
    file.setFormatter(RedactingFormatter("%(asctime)s  %(message)s"))
    if own_process:
        for handler in [*log.handlers]:
            log.removeHandler(handler)
            handler.close()
        if ranks.is_main:
            log.addHandler(logging.StreamHandler(sys.stdout))
        log.propagate = False
        silence_libraries()
    log.addHandler(file)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    except BaseException as error:  # the log ends with the error, even if the caller prints it too
        if not isinstance(error, GeneratorExit):
            known = isinstance(error, ValueError | OSError | KeyboardInterrupt)
            trace = None if known else (type(error), error, error.__traceback__)
            message = ("%s: %s", (type(error).__name__, error))
            file.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, *message, trace))
        raise
    finally:
        if not own_process:
            log.removeHandler(file)
            log.setLevel(level)
            file.close()
