"""Contents that are asked about at the same time, from several threads, are asked about once."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Answers to contents by name: what is under way for one caller is waited for by the others."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._under_way: dict[str, Future[T]] = {}

    def get(
        self, names: Sequence[str], *, known: Callable[[Sequence[str]], dict[str, T]], ask: Callable[[Sequence[str]], Sequence[T]]
    ) -> list[T]:
        """An answer each, in order: ``known`` already, on its way to another caller, or what ``ask`` gives for all others.

        ``ask`` keeps its answers where ``known`` finds them. An error of ``ask`` reaches everyone who waits for it.
        """
        with self._lock:
            found = known(list(dict.fromkeys(names)))
            waiting = {name: self._under_way[name] for name in names if name in self._under_way and name not in found}
            mine = [name for name in dict.fromkeys(names) if name not in found and name not in waiting]
            promised: dict[str, Future[T]] = {name: Future() for name in mine}
            self._under_way |= promised
        try:
            if mine:
                found |= zip(mine, ask(mine), strict=True)
        except BaseException as error:
            for promise in promised.values():
                promise.set_exception(error)
            raise
        finally:
            with self._lock:
                for name in mine:
                    del self._under_way[name]
        for name in mine:
            promised[name].set_result(found[name])
        found |= {name: future.result() for name, future in waiting.items()}
        return [found[name] for name in names]
