"""Two rehearsals at the same time: one in this process, and one in a second process."""

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from retouch.config.imports import spawning
from retouch.records.libraries import silence_libraries

_log = logging.getLogger(__name__)

A = TypeVar("A")
R = TypeVar("R")


def each_in_turn(function: Callable[[A], R], first: A, second: A) -> tuple[R, R]:
    """``function`` of both arguments, one after the other."""
    return function(first), function(second)


def both(function: Callable[[A], R], first: A, second: A) -> tuple[R, R]:
    """``function`` of both arguments at the same time. ``function`` and its results must be picklable.

    An error of the first argument is raised. If the second process fails, its work is repeated in this process, so that an error
    has its traceback.
    """
    # A forked process would inherit locks that threads of torch hold.
    with spawning() as context, ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=quiet) as pool:
        waiting = pool.submit(function, second)
        result = function(first)
        error = waiting.exception()
    if error is None:
        return result, waiting.result()
    _log.warning("the second process failed (%s); its work is repeated in this process", error)
    return result, function(second)


def quiet() -> None:
    """Turn off the messages of the libraries during a rehearsal."""
    silence_libraries()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
