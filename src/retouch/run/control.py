"""Reads the control requests to a run (``records.control``) at the end of each step, and answers them."""

import logging
import os
import time
from dataclasses import dataclass

import torch

from retouch.distributed.ranks import Ranks
from retouch.records.control import ControlRequest, answer_request, read_requests
from retouch.records.folder import RunFolder
from retouch.records.ownership import NotOwner

log = logging.getLogger("retouch")
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class StepRequests:
    """What the run does after a step because of requests; the same on all ranks."""

    stop: bool
    checkpoint: bool


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

    def wanted(self, *, stop: bool, last: bool) -> StepRequests:
        """Return what new requests ask for; the same on all ranks. ``stop``: whether a signal asked this rank to stop. ``last``:
        whether this is the last step of the run, at which requests have no effect."""
        if self._ranks.is_main:
            self._waiting = self._new()
        for request in () if last else self._waiting.values():
            if request.action == "samples" and request.value is not None:
                self.samples_every = request.value
        actions = set() if last else {request.action for request in self._waiting.values()}
        flags = torch.tensor([float(stop or "stop" in actions), float("checkpoint" in actions)])
        stopping, saving = self._ranks.max(flags).tolist()
        return StepRequests(stop=stopping > 0, checkpoint=saving > 0)

    def answer(self, step: int, *, last: bool) -> None:
        """Answer the requests of this step, after the run has carried them out."""
        for name, request in self._waiting.items():
            if last:
                self._write(name, request, taken=False, step=step, answer="this was the last step; the run ends with a checkpoint")
            else:
                self._write(name, request, taken=True, step=step, answer=_done(request, step))
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


def _done(request: ControlRequest, step: int) -> str:
    if request.action == "stop":
        return f"stopped after step {step}, with a checkpoint"
    if request.action == "checkpoint":
        return f"saved a checkpoint of step {step}"
    return f"samples are stored every {request.value} steps from now on" if request.value else "no more samples are stored"
