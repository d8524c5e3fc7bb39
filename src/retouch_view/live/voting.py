"""The endpoints of ``retouch view --vote``: pairs of images, the votes on them, and statistics of the votes.

Voting is blind: the page gets an instruction and the addresses of images, which name neither a run, nor a step, nor a file.
"""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from retouch.records.files import inside, jsonable
from retouch_view.live.requests import FRESH, NotFoundError, read_object, run_of
from retouch_view.live.runs import Catalogue, LiveRun
from retouch_view.votes.log import CHOICES, FILE, VoteLog, VotePair, voter_name
from retouch_view.votes.queue import NextPair, StoredPairs, StoredSamples, VoteQueue, next_pair
from retouch_view.votes.statistics import summarise

QUEUE = "queue"
_MOST_BYTES = 10_000
_MOST_QUESTIONS, _MOST_ANSWERED = 2000, 100


@dataclass(frozen=True, slots=True)
class VoteQuestion:
    """A question to a voter. ``log``: stores the vote. ``root``: the folder of the runs; no file outside of it is served."""

    voter: str
    log: VoteLog
    next: NextPair
    root: Path

    def image(self, which: str) -> Path | None:
        """Return the file of ``left``, ``right`` or ``source``; None if there is none, or if a link leads out of ``root``."""
        pair = self.next.pair
        first, second = (pair.second, pair.first) if self.next.exchanged else (pair.first, pair.second)
        file = {"left": first.file, "right": second.file, "source": pair.source}.get(which)
        if file is None:
            return None
        path = (self.log.folder / file).resolve()
        return path if path.is_relative_to(self.root) and path.suffix == ".png" and path.is_file() else None


def _remember(questions: OrderedDict[str, VoteQuestion], identity: str, question: VoteQuestion, *, most: int) -> None:
    """Add a question, and remove the oldest ones so that at most ``most`` remain."""
    questions[identity] = question
    while len(questions) > most:
        questions.popitem(last=False)


class VotingState:
    """The pairs to vote on, and the open and recently answered questions. Methods may be called from several threads."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._questions: OrderedDict[str, VoteQuestion] = OrderedDict()
        self._answered: OrderedDict[str, VoteQuestion] = OrderedDict()
        self._logs: dict[Path, VoteLog] = {}
        self._queues: dict[Path, VoteQueue] = {}
        self._stored: dict[Path, StoredPairs] = {}

    def overview(self, run: LiveRun) -> dict[str, Any]:
        """Return what can be voted on: the steps with stored images of this run and of others, and the number of queued pairs."""
        with self._lock:
            waiting = None
            if (inside(run.folder.root, QUEUE) / "groups").is_dir():
                queue = self._queue(inside(run.folder.root, QUEUE))
                waiting = sum(len(queue.unanswered(group)) for group in queue.open_groups())
            runs = {name: other.folder.sample_steps() for name, other in self._catalogue.runs().items()}
            return {
                "waiting": waiting,
                "steps": runs.get(run.folder.name, run.folder.sample_steps()),
                "others": [{"name": name, "steps": steps} for name, steps in runs.items() if name != run.folder.name and steps],
            }

    def next(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the next question for a voter. Raises ValueError for an unknown run or step, or an invalid name of a voter."""
        voter = voter_name(query.get("voter", ""))
        with self._lock:
            log, pairs, shared = self._poll(query)
            votes = log.read()
            found = next_pair(pairs, votes, voter, shared=shared)
            own = {vote.pair for vote in votes.votes if vote.voter == voter}
            done = sum(bool(votes.by_pair.get(pair.id)) if shared else pair.id in own for pair in pairs)
            given = sum(vote.voter == voter for vote in votes.votes)
            progress = {"done": done, "total": len(pairs), "given": given, "live": shared}
            if found is None:
                return {"question": None, **progress}
            identity = secrets.token_urlsafe(12)
            _remember(self._questions, identity, VoteQuestion(voter, log, found, self._catalogue.root), most=_MOST_QUESTIONS)
            shown = {"id": identity, "instruction": found.pair.instruction, "source": found.pair.source is not None}
            return {"question": shown, **progress}

    def answer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Record a vote. Raises ValueError for an invalid choice, or a question that is unknown or already answered."""
        choice = given.get("choice")
        if choice not in CHOICES:
            raise ValueError(f"choose one of {', '.join(CHOICES)}")
        with self._lock:
            identity = str(given.get("question"))
            question = self._questions.pop(identity, None)
            if question is None:
                raise ValueError("this pair was already answered, or the server was restarted; here is the next one")
            _remember(self._answered, identity, question, most=_MOST_ANSWERED)
            made = question.next
            vote = made.pair.vote(choice, voter=question.voter, exchanged=made.exchanged, repeat=made.repeat)
            question.log.add(vote)
            return {"vote": vote.id}

    def undo(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Undo the last vote of the voter. Raises ValueError if there is none."""
        voter = voter_name(str(given.get("voter", "")))
        with self._lock:
            log, _, _ = self._poll({key: str(value) for key, value in given.items()})
            own = [vote for vote in log.read().votes if vote.voter == voter]
            if not own:
                raise ValueError("you have no vote to undo")
            log.undo(own[-1].id, voter=voter)
            return {"undone": own[-1].id}

    def image(self, question: str, which: str) -> Path | None:
        """Return the image of an open or recently answered question: a voter may answer before the images have loaded."""
        with self._lock:
            found = self._questions.get(question) or self._answered.get(question)
        return None if found is None else found.image(which)

    def results(self, run: LiveRun) -> dict[str, Any]:
        """Return the statistics of the votes of a run."""
        with self._lock:
            folders = [run.folder.root, inside(run.folder.root, QUEUE)]
            logs = [self._log(folder) for folder in folders if (folder / FILE).is_file()]
        return {"run": run.folder.name, **summarise(logs)}

    def _poll(self, query: Mapping[str, str]) -> tuple[VoteLog, list[VotePair], bool]:
        """Return the log of the votes, the pairs, and whether one vote on each pair is enough (``shared``)."""
        run = self._run(query.get("run", ""))
        root = run.folder.root
        if query.get("live"):
            queue = self._queue(inside(root, QUEUE))
            return queue.log, [group.pair(pair) for group in queue.open_groups() for pair in group.pairs], True
        other = self._run(query.get("other") or query.get("run", ""))
        makes = self._stored.setdefault(root, StoredPairs(root))
        return (
            self._log(root),
            makes.pairs(self._samples(run, query.get("step")), self._samples(other, query.get("other_step"))),
            False,
        )

    def _samples(self, run: LiveRun, step: str | None) -> StoredSamples:
        number = int(step) if step is not None and step.isascii() and step.isdecimal() and len(step) < 10 else -1
        if number not in run.folder.sample_steps():
            raise ValueError(f"run {run.folder.name} has no stored images of step {step}")
        lines = [line for line in run.samples(number) if line["set"] == "heldout"]
        return StoredSamples(f"{run.folder.name} step {number}", run.folder.samples(number), lines)

    def _run(self, name: str) -> LiveRun:
        run = self._catalogue.run(name)
        if run is None:
            raise ValueError("there is no such run")
        return run

    def _queue(self, folder: Path) -> VoteQueue:
        return self._queues.setdefault(folder, VoteQueue(folder))

    def _log(self, folder: Path) -> VoteLog:
        return self._queue(folder).log if folder.name == QUEUE else self._logs.setdefault(folder, VoteLog(folder))


def voting_routes(catalogue: Catalogue, *, writes: bool) -> list[Route]:
    """``GET /api/votes/NAME/results``; with ``writes`` also ``GET`` of ``/api/votes/NAME`` (what can be voted on),
    ``/api/next-pair`` and ``/pair-images``, and ``POST`` of ``/api/votes`` and ``/api/undo-vote``."""
    polls = VotingState(catalogue)

    async def overview(request: Request) -> Response:
        return await _reply(polls.overview, await run_of(request, catalogue))

    async def results(request: Request) -> Response:
        return await _reply(polls.results, await run_of(request, catalogue))

    async def next_question(request: Request) -> Response:
        return await _reply(polls.next, request.query_params)

    async def vote(request: Request) -> Response:
        return await _reply(polls.answer, await read_object(request, max_bytes=_MOST_BYTES))

    async def undo(request: Request) -> Response:
        return await _reply(polls.undo, await read_object(request, max_bytes=_MOST_BYTES))

    async def image(request: Request) -> Response:
        path = await run_in_threadpool(polls.image, request.path_params["question"], request.path_params["which"])
        if path is None:
            raise NotFoundError("image")
        return FileResponse(path, media_type="image/png", headers=FRESH)

    routes = [Route("/api/votes/{name}/results", results)]
    if not writes:
        return routes
    return [
        *routes,
        Route("/api/votes/{name}", overview),
        Route("/api/next-pair", next_question),
        Route("/api/votes", vote, methods=["POST"]),
        Route("/api/undo-vote", undo, methods=["POST"]),
        Route("/pair-images/{question}/{which}", image),
    ]


async def _reply(function: Callable[[Any], dict[str, Any]], given: Any) -> Response:
    try:
        found = await run_in_threadpool(function, given)
    except OSError as error:
        return JSONResponse({"error": f"the vote could not be written: {error.strerror}"}, 409)
    return JSONResponse(jsonable(found), headers=FRESH)
