"""Single flight: if several threads ask for the same content at the same time, one thread asks and all receive its answer."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Answers by key. While one caller asks for a key, the other callers wait for its answer."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._in_flight: dict[str, Future[T]] = {}

    def get(
        self, keys: Sequence[str], *, recall: Callable[[Sequence[str]], dict[str, T]], ask: Callable[[Sequence[str]], Sequence[T]]
    ) -> list[T]:
        """An answer for each key, in order: from ``recall``, from another caller that is asking for the key, or from ``ask``.

        ``ask`` is called once, with the remaining keys, and must store its answers where ``recall`` finds them. If it raises an
        error, the error is raised for each caller that waits for one of these keys.
        """
        with self._lock:
            found = recall(list(dict.fromkeys(keys)))
            waiting = {key: self._in_flight[key] for key in keys if key in self._in_flight and key not in found}
            mine = [key for key in dict.fromkeys(keys) if key not in found and key not in waiting]
            promised: dict[str, Future[T]] = {key: Future() for key in mine}
            self._in_flight |= promised
        try:
            if mine:
                found |= zip(mine, ask(mine), strict=True)
        except BaseException as error:
            for promise in promised.values():
                promise.set_exception(error)
            raise
        finally:
            with self._lock:
                for key in mine:
                    del self._in_flight[key]
        for key in mine:
            promised[key].set_result(found[key])
        found |= {key: future.result() for key, future in waiting.items()}
        return [found[key] for key in keys]
