"""A client of one OpenAI-compatible endpoint (OpenAI, vLLM, SGLang, llama.cpp), with the official ``openai`` package.

Each question results in an answer, with or without scores. After a time-out, a server error, or a truncated or unusable reply, the
question is sent again until the attempts or the deadline are exhausted. After a final error (400, 401, 404 and so on) it is not
sent again. A fault never becomes a score.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from retouch.config import keys
from retouch.config.keys import redacted
from retouch.rewards.quota import event_loop
from retouch.rewards.quota.progress_semaphore import ProgressSemaphore
from retouch.rewards.quota.quota import Quota, Turn, Turns
from retouch.rewards.vlm import chat_format, credentials
from retouch.rewards.vlm.backoff import backoff_pause, retry_after
from retouch.rewards.vlm.endpoint_settings import EndpointSettings
from retouch.rewards.vlm.questions import Answer, Question

_TRANSIENT = frozenset({408, 409, 425, 429})  # and every 5xx
_POLL = 1.0  # seconds between two requests to a server that is not up
_BETWEEN_MESSAGES = 60.0  # seconds
_LONGEST_MESSAGE = 10_000  # characters of a server's error message that are searched for API keys
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Fault:
    """An attempt without a usable answer. ``wait``: seconds that the server demands before the next attempt. ``final``: the
    question is not sent again."""

    reason: str
    wait: float | None = None
    final: bool = False
    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Tries:
    """The attempts at one question: their number, the faults of the failed attempts, the latest seed, and the total tokens."""

    seed: int
    made: int = 0
    read: int = 0
    written: int = 0
    faults: list[str] = field(default_factory=list)

    def count(self, outcome: Answer | _Fault) -> None:
        """Add one attempt and its tokens."""
        self.made += 1
        self.read += outcome.input_tokens
        self.written += outcome.output_tokens


class ChatClient:
    """A client of one ``EndpointSettings``, with at most ``concurrency`` concurrent requests over all calls and threads.

    The API key is read as in ``credentials.api_key``. Raises ValueError if there is no key, the key is not bound to the address
    (``retouch.config.keys``), the ``openai`` package (extra ``judge``) is not installed, ``quota.cost`` is set without prices, or
    the server has not answered after ``wait`` seconds.
    """

    def __init__(self, endpoint: EndpointSettings) -> None:
        for problem in endpoint.problems("judge"):
            raise ValueError(problem)
        self._openai, self._http = _packages()
        self._key = credentials.api_key(endpoint.key)
        for variable, url in endpoint.keys_sent():
            keys.require_bound(variable, url)
        self.endpoint = endpoint
        # Ledgers store answers under this text, so it must not change.
        self.identity = f"{endpoint.model}{', typed' if endpoint.typed else ''}{', guided' if endpoint.guided else ''}"
        self.quota = None if endpoint.quota is None else endpoint.quota.open()
        self._warned_of_usage = False
        self._client, self._line, self._turns = event_loop.submit(self._open()).result()
        if endpoint.start_wait > 0:
            event_loop.submit(self._wait_until_up()).result()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return an answer to each question, in order. Several threads may call this method.

        Raises BudgetSpent if the quota does not suffice for all questions; no question was sent then.
        """
        if self.quota is not None:
            self.quota.claim(len(questions))
        began = time.monotonic()
        typed, guided = self.endpoint.typed, self.endpoint.guided
        urls = chat_format.data_urls(questions)
        requests = [chat_format.request(question, typed=typed, guided=guided, urls=urls) for question in questions]
        answers = event_loop.submit(self._ask_all(questions, requests, began)).result()
        faults = Counter(answer.fault for answer in answers if answer.fault)
        if faults:
            says = ", ".join(f"{count} {reason}" for reason, count in faults.most_common())
            _log.warning("%s: %d of %d answers are missing (%s)", self.endpoint.model, faults.total(), len(answers), says)
        return answers

    def share_quota(self, quota: Quota) -> None:
        """Count all further requests against this quota, which several clients may share."""
        self.quota, self._turns = quota, event_loop.submit(self._new_turns(quota)).result()

    def close(self) -> None:
        """Close the connections."""
        event_loop.submit(self._client.close()).result()

    async def _open(self) -> tuple[Any, ProgressSemaphore, Turns | None]:
        own = self.endpoint
        http = self._http.BoundedClient(timeout=own.timeout, connections=own.concurrency)
        client = self._openai.AsyncOpenAI(
            api_key=self._key, base_url=own.base_url, max_retries=0, timeout=own.timeout, http_client=http
        )
        client.admin_api_key = None  # the package reads OPENAI_ADMIN_KEY from the environment; no question needs it
        if not keys.is_bound("OPENAI_ORG_ID", own.base_url):
            client.organization = None
        if not keys.is_bound("OPENAI_PROJECT_ID", own.base_url):
            client.project = None
        line = ProgressSemaphore(own.concurrency, patience=own.deadline)
        return client, line, None if self.quota is None else await self._new_turns(self.quota)

    async def _new_turns(self, quota: Quota) -> Turns:
        return Turns(quota)

    async def _wait_until_up(self) -> None:
        """Request the list of models until the server replies without a server error (5xx).

        Raises ValueError if there is no such reply within ``wait`` seconds.
        """
        own, openai = self.endpoint, self._openai
        began = message_at = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(own.timeout):
                    await self._client.models.with_raw_response.list()
                return
            except openai.APIStatusError as error:
                if error.status_code < 500:  # the server is up, even if it does not know this path
                    return
                fault = f"HTTP {error.status_code}"
            except (openai.APIConnectionError, TimeoutError):
                fault = "no connection"
            waited = time.monotonic() - began
            if waited >= own.wait:
                await self._client.close()
                raise ValueError(
                    f"the judge {own.description} is not up after {waited:.0f} s ({fault}); start its server, correct base_url, or "
                    "increase the judge's wait"
                )
            if began + waited >= message_at:
                message_at = began + waited + _BETWEEN_MESSAGES
                _log.warning("waiting for the judge %s (%s), at most %.0f s more", own.description, fault, own.wait - waited)
            await asyncio.sleep(min(_POLL, own.wait - waited))

    async def _ask_all(self, questions: Sequence[Question], requests: Sequence[dict[str, Any]], began: float) -> list[Answer]:
        pairs = zip(questions, requests, strict=True)
        return list(await asyncio.gather(*(self._ask_one(question, fields, began) for question, fields in pairs)))

    async def _ask_one(self, question: Question, fields: dict[str, Any], began: float) -> Answer:
        tries = _Tries(seed=question.seed)
        try:
            end = await self._line.enter(since=began)
            async with asyncio.timeout(end - time.monotonic()):
                outcome = await self._until_answered(question, fields, end, tries)
        except TimeoutError:
            outcome = _Fault("deadline")
        answer = Answer(fault=outcome.reason, text=outcome.text) if isinstance(outcome, _Fault) else outcome
        return replace(
            answer,
            attempts=tries.made,
            faults=tuple(tries.faults),
            seed=tries.seed,
            temperature=question.temperature,
            seconds=time.monotonic() - began,
            input_tokens=tries.read,
            output_tokens=tries.written,
            cost=self.endpoint.cost(input_tokens=tries.read, output_tokens=tries.written),
        )

    async def _until_answered(self, question: Question, fields: dict[str, Any], end: float, tries: "_Tries") -> Answer | _Fault:
        """Return the first usable answer, or the last fault. The caller has acquired the semaphore; it is released during pauses
        and at the end."""
        key = chat_format.digest(fields)
        counted = 0
        inside = True
        try:
            while True:
                turn = await self._turn(end, again=tries.made > 0)
                if isinstance(turn, _Fault):
                    return turn
                tries.seed = (question.seed + 1_000_003 * tries.made) % 2**31  # the same seed might give the same unusable answer
                outcome = await self._attempt(question, {**fields, "seed": tries.seed})
                tries.count(outcome)
                await self._settle(turn, outcome)
                if not isinstance(outcome, _Fault):
                    return outcome
                counted += outcome.wait is None
                pause = self._pause(tries.made - 1 if outcome.wait is None else 0, key) + (outcome.wait or 0.0)
                if outcome.final or counted >= self.endpoint.attempts or time.monotonic() + pause >= end:
                    return outcome
                tries.faults.append(outcome.reason)
                self._line.leave()
                inside = False
                await asyncio.sleep(pause)
                await self._line.enter_again()
                inside = True
        finally:
            if inside:
                self._line.leave()

    def _pause(self, attempt: int, key: str) -> float:
        return backoff_pause(attempt, key, base=self.endpoint.pause, longest=self.endpoint.longest_pause)

    async def _turn(self, end: float, *, again: bool) -> Turn | _Fault | None:
        """Wait for the quota's permission to send a request. Returns None if there is no quota, and a fault if it is exhausted."""
        if self.quota is None or self._turns is None:
            return None
        if again and not await asyncio.to_thread(self.quota.claim_another):
            return _Fault("budget", final=True)
        turn = await self._turns.next(self.quota.largest, latest=end)
        return _Fault("rate limit", final=True) if turn is None else turn

    async def _settle(self, turn: Turn | None, outcome: Answer | _Fault) -> None:
        """Report the used tokens to the quota. Without a reply, their number is not known, and the reserved maximum stays
        counted."""
        used = outcome.input_tokens + outcome.output_tokens
        if self.quota is not None and turn is not None and used:
            cost = self.endpoint.cost(input_tokens=outcome.input_tokens, output_tokens=outcome.output_tokens)
            await asyncio.to_thread(self.quota.settle, turn, used=used, cost=cost or 0.0)

    async def _attempt(self, question: Question, fields: dict[str, Any]) -> Answer | _Fault:
        openai = self._openai
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                raw = await self._client.chat.completions.with_raw_response.create(model=self.endpoint.model, **fields)
                body = raw.http_response.content
        except (openai.APITimeoutError, TimeoutError):
            return _Fault("time-out")
        except openai.APIStatusError as error:
            return self._refused(error.status_code, error.message, error.response.headers.get("retry-after"))
        except openai.APIConnectionError as error:
            return _Fault(str(error.__cause__) if isinstance(error.__cause__, self._http.UnboundedReply) else "connection")
        except openai.OpenAIError as error:
            return _Fault(type(error).__name__)
        return self._read(question, body)

    def _refused(self, status: int, message: str, later: str | None) -> _Fault:
        """Convert a reply with an error status to a fault. Only a final fault keeps the server's message: it says what to change.

        A redirect is final, because the question would go to an address that the user did not choose.
        """
        if status in _TRANSIENT or status >= 500:
            return _Fault(f"HTTP {status}", wait=retry_after(later))
        return _Fault(f"HTTP {status}: {redacted(message[:_LONGEST_MESSAGE])[:200]}", final=True)

    def _read(self, question: Question, body: bytes) -> Answer | _Fault:
        received = chat_format.parse_reply(body)
        if received is None:
            return _Fault("unreadable reply")
        counted = chat_format.tokens_of(question, received)
        if counted.estimated and not self._warned_of_usage:
            self._warned_of_usage = True
            problem = (
                "reports no usage"
                if received.usage is None
                else f"reports a usage that is impossible ({redacted(str(received.usage)[:200])})"
            )
            _log.warning("%s %s; its tokens are estimated from the texts and images", self.endpoint.description, problem)
        text = redacted(received.reply.text)
        scores = question.form.read(received.reply)
        self._line.answered()
        if scores is None:
            cause = "refusal" if received.reply.refused else "unusable answer"
            return _Fault(cause, text=text, input_tokens=counted.input, output_tokens=counted.output)
        return Answer(scores=scores, text=text, input_tokens=counted.input, output_tokens=counted.output)


def _packages() -> tuple[Any, Any]:
    """Import the openai package and the module with its HTTP client. Raises ValueError if the package is not installed."""
    try:
        import openai

        from retouch.rewards.vlm import bounded_http
    except ImportError:
        raise ValueError("asking a judge needs the openai package: pip install 'retouch[judge]'") from None
    return openai, bounded_http
