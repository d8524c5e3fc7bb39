"""Two ranks on two threads, which agree on each flag as the ranks of a run do."""

import threading
from collections.abc import Callable

from retouch.policies.engine import EngineFault


class Lockstep:
    def __init__(self) -> None:
        self._meeting = threading.Barrier(2)
        self._flags: dict[int, bool] = {}

    def any_rank(self, rank: int) -> Callable[[bool], bool]:
        """Return what tells this rank whether a flag is true on either rank."""

        def is_any(flag: bool) -> bool:
            self._flags[rank] = flag
            self._meeting.wait(timeout=60)
            found = any(self._flags.values())
            self._meeting.wait(timeout=60)
            return found

        return is_any

    def act(self, *works: Callable[[], object]) -> list[str | None]:
        """Do the work of both ranks; return the text of the fault that each of them raised."""
        faults: list[str | None] = [None, None]

        def of_rank(rank: int) -> None:
            try:
                works[rank]()
            except EngineFault as fault:
                faults[rank] = str(fault)

        threads = [threading.Thread(target=of_rank, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        return faults
