"""A client of one OpenAI-compatible endpoint (OpenAI, vLLM, SGLang, llama.cpp), through the official package.

A question ends as an answer with scores or as one without: time-outs, server errors, cut and unusable replies are asked again
until the attempts or the deadline are spent, and what is refused for good (400, 401, 404 and so on) is not. No fault becomes a
number.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from retouch.rewards.client import event_loop
from retouch.rewards.client.line import Line
from retouch.rewards.quota.quota import Quota, Turn, Turns
from retouch.rewards.vlm import credentials, wire
from retouch.rewards.vlm.asking import Answer, Question
from retouch.rewards.vlm.backoff import Backoff, retry_after
from retouch.rewards.vlm.prices import Prices

_TRANSIENT = frozenset({408, 409, 425, 429})  # and every 5xx
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for, in seconds: ``timeout`` one attempt, ``deadline`` all attempts at a question; those that wait in line
    give up when nothing at all was answered for so long.

    ``attempts``: how often one question is asked; an attempt that the server put off with Retry-After does not count.
    """

    timeout: float = 60.0
    deadline: float = 120.0
    attempts: int = 5
    backoff: Backoff = field(default_factory=Backoff)

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and self.deadline > 0 and self.attempts >= 1):
            raise ValueError(f"{self}: the time-out and the deadline must be above 0 seconds, the attempts at least 1")


@dataclass(frozen=True, slots=True)
class _Fault:
    """An attempt that gave nothing. ``wait``: what the server asked for. ``final``: asking again is no use."""

    reason: str
    wait: float | None = None
    final: bool = False
    text: str = ""
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Tries:
    """How often one question was asked so far, why it was asked again, the latest seed, and tokens of all attempts."""

    seed: int
    made: int = 0
    read: int = 0
    written: int = 0
    faults: list[str] = field(default_factory=list)

    def count(self, outcome: Answer | _Fault) -> None:
        """One attempt more."""
        self.made += 1
        self.read += outcome.input_tokens
        self.written += outcome.output_tokens


class ChatClient:
    """Asks ``model`` at ``base_url``, with at most ``concurrency`` requests in flight over all calls and threads.

    The key is read from the environment variable ``key`` and from nowhere else; None is for servers that ask for none. ``typed``:
    answers are constrained to the form's JSON schema; turn it off for servers that cannot, and the reader must find the scores in
    free text. ``guided``: the field in which the server takes the few answers that a form may have, "structured_outputs" for vLLM
    from 0.11 on, "guided_choice" before 0.12 (neither was tried against a real server); without it they go as a schema.
    ``quota``: how much is asked at most, in requests and in tokens, which ``prices`` turn into money.
    ValueError: no key, no ``openai`` package (extra ``judge``), or settings out of range.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str = "https://api.openai.com/v1",
        key: str | None = credentials.VARIABLE,
        concurrency: int = 32,
        patience: Patience | None = None,
        typed: bool = True,
        guided: wire.Guided | None = None,
        quota: Quota | None = None,
        prices: Prices | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency}: at least one request must be in flight")
        if quota is not None and quota.counts_money and prices is None:
            raise ValueError("a quota of money needs prices: give what a million tokens cost")
        self._openai = _package()
        self._key = credentials.api_key(key)
        self.model = model
        self.identity = f"{model}{', typed' if typed else ''}{', guided' if guided else ''}"
        self.patience = patience or Patience()
        self._typed = typed
        self._guided = guided
        self._quota = quota
        self._prices = prices
        self._client, self._line, self._turns = event_loop.submit(self._open(base_url, concurrency)).result()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer each, in order. May be called from several threads.

        BudgetSpent: the quota does not have enough for all questions, and none was asked.
        """
        if self._quota is not None:
            self._quota.claim(len(questions))
        began = time.monotonic()
        urls = wire.encoded(questions)
        requests = [wire.request(question, typed=self._typed, guided=self._guided, urls=urls) for question in questions]
        answers = event_loop.submit(self._ask_all(questions, requests, began)).result()
        faults = Counter(answer.fault for answer in answers if answer.fault)
        if faults:
            says = ", ".join(f"{count} {reason}" for reason, count in faults.most_common())
            _log.warning("%s: %d of %d answers are missing (%s)", self.model, faults.total(), len(answers), says)
        return answers

    def close(self) -> None:
        """Let go of the connections."""
        event_loop.submit(self._client.close()).result()

    async def _open(self, base_url: str, concurrency: int) -> tuple[Any, Line, Turns | None]:
        client = self._openai.AsyncOpenAI(api_key=self._key, base_url=base_url, max_retries=0, timeout=self.patience.timeout)
        line = Line(concurrency, patience=self.patience.deadline)
        return client, line, None if self._quota is None else Turns(self._quota)

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
            cost=self._cost(tries.read, tries.written),
        )

    async def _until_answered(self, question: Question, fields: dict[str, Any], end: float, tries: "_Tries") -> Answer | _Fault:
        """The first usable answer, or the last fault. A place is held on entry, given back in pauses, and at the end."""
        key = wire.digest(fields)
        counted = 0
        inside = True
        try:
            while True:
                turn = await self._turn(end, again=tries.made > 0)
                if isinstance(turn, _Fault):
                    return turn
                tries.seed = (question.seed + 1_000_003 * tries.made) % 2**31  # the same one might give the same unusable answer
                outcome = await self._attempt(question, {**fields, "seed": tries.seed})
                tries.count(outcome)
                await self._settle(turn, outcome)
                if not isinstance(outcome, _Fault):
                    return outcome
                counted += outcome.wait is None
                pause = self.patience.backoff.pause(tries.made - 1 if outcome.wait is None else 0, key) + (outcome.wait or 0.0)
                if outcome.final or counted >= self.patience.attempts or time.monotonic() + pause >= end:
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

    async def _turn(self, end: float, *, again: bool) -> Turn | _Fault | None:
        """When the quota lets a question be asked; None where there is no quota, a fault where it does not."""
        if self._quota is None or self._turns is None:
            return None
        if again and not await asyncio.to_thread(self._quota.claim_another):
            return _Fault("budget", final=True)
        turn = await self._turns.next(self._quota.largest, latest=end)
        return _Fault("rate limit", final=True) if turn is None else turn

    async def _settle(self, turn: Turn | None, outcome: Answer | _Fault) -> None:
        """Tell the quota what was taken. Without a reply that is not known, and stays at the most that it may have been."""
        used = outcome.input_tokens + outcome.output_tokens
        if self._quota is not None and turn is not None and used:
            cost = self._cost(outcome.input_tokens, outcome.output_tokens)
            await asyncio.to_thread(self._quota.settle, turn, used=used, cost=cost or 0.0)

    def _cost(self, read: int, written: int) -> float | None:
        """What so many tokens cost; None where no price is known."""
        return None if self._prices is None else self._prices.of(input_tokens=read, output_tokens=written)

    async def _attempt(self, question: Question, fields: dict[str, Any]) -> Answer | _Fault:
        openai = self._openai
        try:
            async with asyncio.timeout(self.patience.timeout):
                raw = await self._client.chat.completions.with_raw_response.create(model=self.model, **fields)
                body = raw.http_response.text
        except (openai.APITimeoutError, TimeoutError):
            return _Fault("time-out")
        except openai.APIStatusError as error:
            return self._refused(error.status_code, error.message, error.response.headers.get("retry-after"))
        except openai.APIConnectionError:
            return _Fault("connection")
        except openai.OpenAIError as error:
            return _Fault(type(error).__name__)
        return self._read(question, body)

    def _refused(self, status: int, message: str, later: str | None) -> _Fault:
        """A status that is no success. The server's words are kept only where asking again is no use: they say what to change."""
        if status in _TRANSIENT or status >= 500:
            return _Fault(f"HTTP {status}", wait=retry_after(later))
        return _Fault(f"HTTP {status}: {credentials.redacted(message, self._key)[:200]}", final=True)

    def _read(self, question: Question, body: str) -> Answer | _Fault:
        received = wire.received(body)
        if received is None:
            return _Fault("unreadable reply")
        text = credentials.redacted(received.reply.text, self._key)
        scores = question.form.read(received.reply)
        tokens = {"input_tokens": received.input_tokens, "output_tokens": received.output_tokens}
        self._line.answered()
        if scores is None:
            return _Fault("refusal" if received.reply.refused else "unusable answer", text=text, **tokens)
        return Answer(scores=scores, text=text, **tokens)


def _package() -> Any:
    try:
        import openai
    except ImportError:
        raise ValueError("asking a judge needs the openai package: pip install 'retouch[judge]'") from None
    return openai
