"""The keys of a judge behind an OpenAI-compatible address, as its client reads them."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.rewards.facts import Address, PathText
from retouch.rewards.vlm.base import JudgeModel

if TYPE_CHECKING:
    from retouch.rewards.quota.quota import Quota

_MILLION = 1e6
HEADERS = "OPENAI_CUSTOM_HEADERS"


def _variable(name: str) -> str:
    # The value is not repeated: it may be the key itself.
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise ValueError("give the name of an environment variable, OPENAI_API_KEY say; a key itself never stands in a recipe")
    return name


def _with_version(url: str) -> str:
    return url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1"


Variable: TypeAlias = Annotated[str, AfterValidator(_variable)]
VersionedAddress: TypeAlias = Annotated[Address, AfterValidator(_with_version)]


class JudgeQuota(Section):
    """Limits on what all ranks together request from the endpoint. When a budget is spent, the run ends with a checkpoint."""

    requests_per_minute: Positive | None = None
    """Maximum number of requests in any 60 seconds."""
    tokens_per_minute: Positive | None = None
    """Maximum number of input and output tokens in any 60 seconds."""
    tokens_per_question: Positive = 8000.0
    """Tokens reserved for a question until its answer reports the actual number."""
    calls: Count | None = None
    """Requests in all."""
    cost: Positive | None = None
    """Maximum total cost in dollars, by ``prices``."""
    file: PathText | None = None
    """File with the count that the processes of a machine share, also across runs; null gives each rank its share of the limits."""

    def open(self) -> Quota:
        """The counter of this quota."""
        from retouch.rewards.quota.quota import Quota

        return Quota(
            requests_per_minute=self.requests_per_minute,
            units_per_minute=self.tokens_per_minute,
            largest=self.tokens_per_question,
            calls=self.calls,
            cost=self.cost,
            file=self.file,
        )


class Prices(Section):
    """Prices of the endpoint in dollars per million tokens, for estimates and for a limit on cost."""

    input: NonNegative
    """Price of input tokens."""
    output: NonNegative
    """Price of output tokens."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float:
        """What so many tokens cost in dollars."""
        return (self.input * input_tokens + self.output * output_tokens) / _MILLION


_WAITS = ContextVar("_WAITS", default=True)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Within it, a judge that is opened is not waited for, whatever its ``wait``: for checks, which report what is not there."""
    before = _WAITS.set(False)
    try:
        yield
    finally:
        _WAITS.reset(before)


class EndpointSettings(JudgeModel):
    """Which model to ask, and how; ``Endpoint`` asks it."""

    kind: Literal["endpoint"] = "endpoint"
    model: str
    """The model's name on the server."""
    base_url: VersionedAddress = "https://api.openai.com/v1"
    """The address; ``/v1`` is added if it has no path."""
    key: Variable | None = "OPENAI_API_KEY"
    """Environment variable that holds the key or, with ``_FILE`` after its name, the path of a file that does; null is for servers
    without a key."""
    typed: bool = True
    """Answers are constrained to a JSON schema; false is for servers that cannot, whose answers are read as free text."""
    guided: Literal["structured_outputs", "guided_choice"] | None = None
    """Request field that restricts an answer to a list of words: ``structured_outputs`` for vLLM 0.11 and later, ``guided_choice``
    before 0.12; null sends a JSON schema."""
    concurrency: Count = 32
    """Requests in flight at once, from each rank."""
    timeout: Positive = 60.0
    """Seconds that one attempt may take."""
    deadline: Positive = 120.0
    """Seconds in which a question must be answered, further attempts included. Questions that wait for a place in flight give up
    when nothing was answered for so long. A question without an answer by then has no score."""
    attempts: Count = 5
    """How often one question is asked before its score is missing; attempts that the server put off with Retry-After do not
    count."""
    pause: Positive = 0.5
    """Upper bound of the first pause between attempts, in seconds. It doubles with each attempt; the pause is drawn between 0 and
    the bound."""
    longest_pause: Positive = 20.0
    """Largest upper bound of a pause, in seconds."""
    wait: NonNegative = Field(default=0.0, exclude_if=operator.not_)
    """Seconds to wait at the start for a server that does not answer yet, for example while it loads its model; 0 does not wait."""
    prices: Prices | None = None
    """The server's prices; null estimates no costs."""
    quota: JudgeQuota | None = None
    """Limits on requests, tokens and cost; null sets none."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"base_url", "key", "concurrency", "timeout", "deadline", "attempts", "pause", "longest_pause", "wait", "prices", "quota"}
    )

    @model_validator(mode="after")
    def _pauses_grow(self) -> Self:
        if self.pause > self.longest_pause:
            raise ValueError(
                f"pause {self.pause:g} is above longest_pause {self.longest_pause:g}; give a longest pause that is longer"
            )
        return self

    @property
    def start_wait(self) -> float:
        """Seconds to wait for the server now: ``wait``, or 0 within ``without_waiting``."""
        return self.wait if _WAITS.get() else 0.0

    @property
    def description(self) -> str:
        """The model's name and its address."""
        return f"{self.model} at {self.base_url}"

    def cost(self, *, input_tokens: float, output_tokens: float) -> float | None:
        """What so many tokens cost in dollars; None if no price is known."""
        return None if self.prices is None else self.prices.cost(input_tokens=input_tokens, output_tokens=output_tokens)

    def problems(self, path: str) -> Iterator[str]:
        """A quota of cost without prices."""
        if self.quota is not None and self.quota.cost is not None and self.prices is None:
            yield f"{path}.quota.cost: counted by prices, and there are none; give {path.rpartition('.')[2]}.prices"

    def variables(self) -> Iterator[str]:
        """The key's."""
        if self.key is not None:
            yield self.key

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """The key's, and the headers that the ``openai`` package takes from the environment and sends to every address."""
        if self.key is not None:
            yield self.key, self.base_url
        if HEADERS in os.environ:
            yield HEADERS, self.base_url
