"""A client of one OpenAI-compatible endpoint (OpenAI, vLLM, SGLang, llama.cpp), with the official ``openai`` package.

Each question results in an answer, with or without scores. After a time-out, a server error, or a truncated or unusable reply, the
question is sent again until the attempts or the deadline are exhausted. After a final error (400, 401, 404 and so on) it is not
sent again. A fault never becomes a score. Images are sent as data URLs, by default of PNG files, so that a judge sees exactly the
pixels that the policy made.
"""

import asyncio
import base64
import email.utils
import hashlib
import io
import json
import logging
import math
import os
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import httpx2
import openai
from pydantic import BaseModel, Field, ValidationError

from retouch.config import keys
from retouch.config.keys import redacted
from retouch.core.random import backoff_pause
from retouch_judge.models import EndpointSettings
from retouch_judge.questions import Answer, JudgeReply, Question, first_tokens, quoted_fault
from retouch_judge.quota import ProgressSemaphore, Quota, Turn, Turns, submit

VARIABLE = "OPENAI_API_KEY"


def api_key(variable: str | None = VARIABLE) -> str:
    """Return the key in the environment variable, or else in the file whose path is in the variable ``{variable}_FILE``.

    ``variable``: None for a server without a key; the result is then the text ``none``. Raises ValueError if neither variable is
    set, or if the file cannot be read.
    """
    if variable is None:
        return "none"
    file = os.environ.get(f"{variable}_FILE")
    if file is not None and variable not in os.environ:
        try:
            key = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"{variable}_FILE names {file}, which cannot be read") from None
    else:
        key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(f"{variable} is not set; export the judge's key there, or set key: null for a server without a key")
    return key


def retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header (seconds or a date, in UTC if it names no zone) to seconds, at least 0; None if it is missing or
    unreadable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(value)
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


_WEBP_LIMIT = 16383  # largest side in pixels of the WebP format
_ENCODING: Mapping[str, Mapping[str, Any]] = {
    "png": {"compress_level": 1},
    "webp": {"lossless": True, "quality": 0, "method": 0},
    "jpeg": {"quality": 95, "subsampling": 0},
}
_PIXELS_PER_TOKEN = 28 * 28
_TEMPLATE_TOKENS, _SPARE_TOKENS = 4096, 64  # tokens that a server may count in addition to the inputs, and to the answer
# The request field of vLLM 0.11 and later, and its older name, which vLLM 0.12 has dropped.
Guided: TypeAlias = Literal["structured_outputs", "guided_choice"]


class _Token(BaseModel):
    token: Annotated[str, Field(max_length=1000)]
    logprob: Annotated[float, Field(ge=-1e9, le=1e-3, allow_inf_nan=False)]


class _Place(_Token):
    top_logprobs: Annotated[list[_Token], Field(max_length=1000)] = Field(default_factory=list)


class _Logprobs(BaseModel):
    content: Annotated[list[_Place], Field(max_length=10_000)] | None = None


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one attempt. ``estimated``: the numbers are estimates, because the server's count is missing or impossible."""

    input: int
    output: int
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A reply, and the number of tokens that the server reports: (input, output), None if it reports none."""

    reply: JudgeReply
    usage: tuple[int, int] | None


def parse_reply(body: str | bytes) -> Received | None:
    """Parse the body of a completion with one choice; None if the body is truncated, empty, not JSON, or of another format."""
    try:
        completion = _Completion.model_validate_json(body)
    except ValidationError:
        return None
    choice = completion.choices[0]
    usage = completion.usage
    places = [] if choice.logprobs is None else choice.logprobs.content or []
    reply = JudgeReply(
        text=choice.message.content or "",
        finished=choice.finish_reason or "",
        refused=bool(choice.message.refusal) or choice.finish_reason == "content_filter",
        first=first_tokens((each.token, each.logprob) for place in places[:1] for each in place.top_logprobs),  # may repeat
    )
    return Received(reply, None if usage is None else (usage.prompt_tokens, usage.completion_tokens))


def tokens_of(question: Question, received: Received) -> Tokens:
    """Return the tokens of an attempt: the server's count if it is possible for this question and answer, otherwise an estimate.

    A count is possible if a token stands for 1 to 64 bytes of text, or for at least 64 pixels. A server may add a template to the
    input, and reasoning to the output, up to the form's ``max_tokens``. The estimate is one token per 4 bytes of text and per
    28 x 28 pixels.
    """
    texts = [question.rubric, *(part for part in question.parts if isinstance(part, str))]
    sent = sum(len(text.encode("utf-8", "replace")) for text in texts)
    pixels = [part.width * part.height for part in question.parts if not isinstance(part, str)]
    written = len(received.reply.text.encode("utf-8", "replace"))
    if received.usage is not None:
        inputs, outputs = received.usage
        most = sent + sum(size // 64 for size in pixels) + _TEMPLATE_TOKENS * (len(question.parts) + 1)
        least = max(1, sent // 64), written // 64 + bool(written)
        if least[0] <= inputs <= most and least[1] <= outputs <= question.form.max_tokens + _SPARE_TOKENS:
            return Tokens(inputs, outputs)
    estimate = sent // 4 + sum(size // _PIXELS_PER_TOKEN + 1 for size in pixels)
    return Tokens(estimate + 1, min(written // 4 + 1, question.form.max_tokens), estimated=True)


def request(question: Question, *, typed: bool, urls: Mapping[int, str], guided: Guided | None = None) -> dict[str, Any]:
    """Return the fields of a request, without model and seed.

    ``typed``: add the form's JSON schema, if it has one. ``guided``: the request field for the list of possible answers, which is
    used if the form has such a list. ``urls``: the data URLs of images, by ``id()``.
    """
    system = [{"role": "system", "content": question.rubric}] if question.rubric or not question.verbatim else []
    begun = [{"role": "assistant", "content": question.begins}] if question.begins else []
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": urls[id(part)]}}
        for part in question.parts
    ]
    fields: dict[str, Any] = {
        "messages": [*system, {"role": "user", "content": content}, *begun],
        "temperature": question.temperature,
        "max_completion_tokens": question.form.max_tokens,
    }
    schema, choices = question.form.schema(), list(question.form.choices())
    if schema is None:
        fields |= {"logprobs": True, "top_logprobs": 20}
    elif choices and guided is not None:
        fields["extra_body"] = {"guided_choice": choices} if guided == "guided_choice" else {guided: {"choice": choices}}
    elif typed and schema:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": schema}}
    if begun:  # fields of vLLM and SGLang
        fields["extra_body"] = {"add_generation_prompt": False, "continue_final_message": True}
    return fields


def data_urls(questions: Sequence[Question], form: str = "png") -> dict[int, str]:
    """Return the base64 data URL of every image in the questions, in RGB, by ``id()``; each image is encoded once. ``form``:
    ``image_format``; PNG takes its place for images that are larger than WebP allows."""
    urls: dict[int, str] = {}
    for question in questions:
        for part in question.parts:
            if not isinstance(part, str) and id(part) not in urls:
                kind = "png" if form == "webp" and max(part.size) > _WEBP_LIMIT else form
                buffer = io.BytesIO()
                part.convert("RGB").save(buffer, kind, **_ENCODING[kind])
                urls[id(part)] = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return urls


_TRANSIENT = frozenset({408, 409, 425, 429})  # and every 5xx
_POLL = 1.0  # seconds between two requests to a server that is not up
_BETWEEN_MESSAGES = 60.0  # seconds
_QUIET, _BETWEEN_WAITS = 5.0, 15.0  # seconds a question may wait before it is reported, and between two such messages
_LONGEST_MESSAGE = 10_000  # characters of a server's error message that are searched for API keys
_log = logging.getLogger("retouch.judge")  # below "retouch", so that a run's log has it


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
    began: float = field(default_factory=time.monotonic)


class ChatClient:
    """A client of one ``EndpointSettings``, with at most ``concurrency`` concurrent requests over all calls and threads.

    The API key is read as in ``api_key``. Raises ValueError if there is no key, the key is not bound to the address
    (``retouch.config.keys``), ``quota.cost`` is set without prices, or the server has not answered after ``wait`` seconds.
    """

    def __init__(self, endpoint: EndpointSettings) -> None:
        for problem in endpoint.problems("judge"):
            raise ValueError(problem)
        key = api_key(endpoint.key)
        for variable, url in endpoint.keys_sent():
            keys.require_bound(variable, url)
        self.endpoint = endpoint
        # Ledgers store answers under this text, so it must not change.
        lossy = ", jpeg" if endpoint.image_format == "jpeg" else ""
        self.identity = f"{endpoint.model}{', typed' if endpoint.typed else ''}{', guided' if endpoint.guided else ''}{lossy}"
        self.quota = None if endpoint.quota is None else endpoint.quota.open()
        self._warned_of_usage = False
        self._message_at = -math.inf  # when a wait was last reported
        self._line = ProgressSemaphore(endpoint.concurrency, patience=endpoint.deadline)
        self._turns = None if self.quota is None else Turns(self.quota)
        http = BoundedClient(timeout=endpoint.timeout, connections=endpoint.concurrency)
        self._client = openai.AsyncOpenAI(
            api_key=key, base_url=endpoint.base_url, max_retries=0, timeout=endpoint.timeout, http_client=http
        )
        self._client.admin_api_key = None  # the package reads OPENAI_ADMIN_KEY from the environment; no question needs it
        if not keys.is_bound("OPENAI_ORG_ID", endpoint.base_url):
            self._client.organization = None
        if not keys.is_bound("OPENAI_PROJECT_ID", endpoint.base_url):
            self._client.project = None
        if endpoint.start_wait > 0:
            submit(self._wait_until_up()).result()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return an answer to each question, in order. Several threads may call this method. Raises BudgetSpent if the quota does
        not suffice for all questions; no question was sent then."""
        if self.quota is not None:
            self.quota.claim(len(questions))
        began = time.monotonic()
        typed, guided = self.endpoint.typed, self.endpoint.guided
        urls = data_urls(questions, self.endpoint.image_format)
        requests = [request(question, typed=typed, guided=guided, urls=urls) for question in questions]

        async def ask_all() -> list[Answer]:
            pairs = zip(questions, requests, strict=True)
            return list(await asyncio.gather(*(self._ask_one(question, fields, began) for question, fields in pairs)))

        answers = submit(ask_all()).result()
        if again := Counter(reason for answer in answers for reason in answer.faults):
            says = ", ".join(f"{count} {reason}" for reason, count in again.most_common())
            _log.info("%s: %d requests were repeated (%s)", self.endpoint.model, again.total(), says)
        faults = Counter(answer.fault for answer in answers if answer.fault)
        if faults:
            says = ", ".join(f"{count} {reason}" for reason, count in faults.most_common())
            texts = [(answer.fault, answer.text) for answer in answers if answer.fault and answer.text]
            says += f"; for example {quoted_fault(texts)}" if texts else ""
            _log.warning("%s: %d of %d answers are missing (%s)", self.endpoint.model, faults.total(), len(answers), says)
        return answers

    def share_quota(self, quota: Quota) -> None:
        """Count all further requests against this quota, which several clients may share."""
        self.quota, self._turns = quota, Turns(quota)

    def close(self) -> None:
        """Close the connections."""
        submit(self._client.close()).result()

    async def _wait_until_up(self) -> None:
        """Request the list of models until the server replies without a server error (5xx). Raises ValueError if there is no such
        reply within ``wait`` seconds."""
        own = self.endpoint
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
        key = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
        counted = 0
        inside = True
        try:
            while True:
                turn: Turn | None = None
                if self.quota is not None and self._turns is not None:
                    if tries.made > 0 and not await asyncio.to_thread(self.quota.claim_another):
                        return _Fault("budget", final=True)
                    turn = await self._turns.next(self.quota.largest, latest=end)
                    if turn is None:
                        return _Fault("rate limit", final=True)
                tries.seed = (question.seed + 1_000_003 * tries.made) % 2**31  # the same seed might give the same unusable answer
                outcome = await self._attempt(question, {**fields, "seed": tries.seed})
                tries.made += 1
                tries.read += outcome.input_tokens
                tries.written += outcome.output_tokens
                used = outcome.input_tokens + outcome.output_tokens
                # Without a reply, the number of used tokens is not known, and the reserved maximum stays counted.
                if self.quota is not None and turn is not None and used:
                    cost = self.endpoint.cost(input_tokens=outcome.input_tokens, output_tokens=outcome.output_tokens)
                    await asyncio.to_thread(self.quota.settle, turn, used=used, cost=cost or 0.0)
                if not isinstance(outcome, _Fault):
                    return outcome
                counted += outcome.wait is None
                limits = {"base": self.endpoint.pause, "longest": self.endpoint.longest_pause}
                attempt = tries.made - 1 if outcome.wait is None else 0
                pause = backoff_pause("judge", "pause", key, attempt=attempt, **limits) + (outcome.wait or 0.0)
                if outcome.final or counted >= self.endpoint.attempts or time.monotonic() + pause >= end:
                    return outcome
                tries.faults.append(outcome.reason)
                self._line.leave()
                inside = False
                now = time.monotonic()
                if now + pause - tries.began >= _QUIET and now >= self._message_at + _BETWEEN_WAITS:
                    self._message_at = now
                    said = "%s: %s; questions wait to be asked again, for at most %.0f s (the judge's deadline)"
                    _log.warning(said, self.endpoint.description, outcome.reason, end - now)
                await asyncio.sleep(pause)
                await self._line.enter_again()
                inside = True
        finally:
            if inside:
                self._line.leave()

    async def _attempt(self, question: Question, fields: dict[str, Any]) -> Answer | _Fault:
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                raw = await self._client.chat.completions.with_raw_response.create(model=self.endpoint.model, **fields)
                body = raw.http_response.content
        except (openai.APITimeoutError, TimeoutError):
            return _Fault("time-out")
        except openai.APIStatusError as error:
            status = error.status_code
            if status in _TRANSIENT or status >= 500:
                return _Fault(f"HTTP {status}", wait=retry_after(error.response.headers.get("retry-after")))
            # Only a final fault keeps the server's message: it says what to change. A redirect is final, because the question
            # would go to an address that the user did not choose.
            return _Fault(f"HTTP {status}: {redacted(error.message[:_LONGEST_MESSAGE])[:200]}", final=True)
        except openai.APIConnectionError as error:
            return _Fault(str(error.__cause__) if isinstance(error.__cause__, UnboundedReply) else "connection")
        except openai.OpenAIError as error:
            return _Fault(type(error).__name__)
        return self._read(question, body)

    def _read(self, question: Question, body: bytes) -> Answer | _Fault:
        received = parse_reply(body)
        if received is None:
            return _Fault("unreadable reply")
        counted = tokens_of(question, received)
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


MAX_REPLY_BYTES = 4 * 2**20
_GZIP_OR_ZLIB = 47  # wbits of zlib: the format is read from the header
_CODINGS = frozenset({"gzip", "x-gzip", "deflate"})


class UnboundedReply(httpx2.TransportError):
    """A reply has more than ``MAX_REPLY_BYTES`` bytes, or a compression whose size cannot be bounded."""


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client that never follows a redirect and bounds the size of replies.

    Reading a reply raises ``UnboundedReply`` at the first byte above the limit, counted both compressed and decompressed.
    """

    def __init__(self, *, timeout: float, connections: int) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=connections)
        super().__init__(timeout=timeout, limits=limits, follow_redirects=False, headers={"Accept-Encoding": "identity"})

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """Send a request and return the reply. The option ``follow_redirects`` has no effect: a redirect is returned as a reply."""
        response = await super().send(request, stream=True, **{**options, "follow_redirects": False})
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        coding = response.headers.pop("content-encoding", "identity").strip().lower()
        if coding not in ("identity", *_CODINGS):
            await response.aclose()
            raise UnboundedReply(f"a reply in the compression {coding[:20]!r}")
        # The reply's charset may name a codec that does not decode to text. JSON is always UTF-8.
        response.encoding = "utf-8"
        response.stream = _BoundedStream(response.stream, zlib.decompressobj(_GZIP_OR_ZLIB) if coding in _CODINGS else None)
        if not stream:
            try:
                await response.aread()
            finally:
                await response.aclose()
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    """A stream of the bytes of ``inner``, decompressed if there is a decompressor."""

    def __init__(self, inner: httpx2.AsyncByteStream, decompressor: "zlib._Decompress | None") -> None:
        self._inner, self._decompressor = inner, decompressor

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = passed = 0
        async for part in self._inner:
            received += len(part)
            if self._decompressor is not None:
                try:
                    part = self._decompressor.decompress(part, MAX_REPLY_BYTES + 1 - passed)
                except zlib.error:
                    raise UnboundedReply("a reply that is not what its Content-Encoding says") from None
            passed += len(part)
            if received > MAX_REPLY_BYTES or passed > MAX_REPLY_BYTES:
                raise UnboundedReply(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        """Close the connection, or return it to the pool if the whole reply was read."""
        await self._inner.aclose()
