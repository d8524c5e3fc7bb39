"""The base class of the ``judge`` sections of a recipe, and the keys of a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.rewards.base import Address, LoadedModel, PathText
from retouch_judge.questions import JudgeClient
from retouch_judge.quota import Quota

if TYPE_CHECKING:
    import torch


class JudgeModel(Section, ABC):
    """A vision-language model that answers questions about images."""

    changeable: ClassVar[frozenset[str]] = frozenset({"device"})
    """Keys that may differ when a run is resumed, because they do not change any answer."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The model's name and its location (address or folder), for messages."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float | None:
        """Return the cost of these tokens in dollars; None if no price is known."""
        return None

    @abstractmethod
    def open(self, *, device: torch.device | str = "cpu") -> JudgeClient:
        """Open a client of the model. ``device``: the default device of a model in this process, if its section names none. Raises
        ValueError if there is no key in the environment, there are no weights, or a package is not installed."""

    def problems(self, path: str) -> Iterator[str]:
        """Yield a message for each pair of keys that contradict each other. ``path``: path of the section in the recipe."""
        yield from ()

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the model if it runs in this process."""
        yield from ()

    def variables(self) -> Iterator[str]:
        """Yield the environment variables that the client needs."""
        yield from ()

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Yield the environment variables of the API keys that the client sends, each with the URL of the server."""
        yield from ()


HEADERS = "OPENAI_CUSTOM_HEADERS"


def _variable(name: str) -> str:
    # The value is not repeated: it may be the key itself.
    if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise ValueError("give the name of an environment variable, such as OPENAI_API_KEY; a recipe never contains the key itself")
    return name


Variable: TypeAlias = Annotated[str, AfterValidator(_variable)]


VersionedAddress: TypeAlias = Annotated[
    Address, AfterValidator(lambda url: url if urlsplit(url).path.strip("/") else f"{url.rstrip('/')}/v1")
]


class JudgeQuota(Section):
    """Limits on the requests of all ranks together to the endpoint. When a budget is spent, the run ends with a checkpoint."""

    requests_per_minute: Positive | None = None
    """Maximum number of requests in any 60 seconds."""
    tokens_per_minute: Positive | None = None
    """Maximum number of input and output tokens in any 60 seconds."""
    tokens_per_question: Positive = 8000.0
    """Tokens reserved for a question until its answer reports the actual number."""
    calls: Count | None = None
    """Maximum total number of requests."""
    cost: Positive | None = None
    """Maximum total cost in dollars, computed from ``prices``."""
    file: PathText | None = None
    """File with a counter that all processes of a machine share, also across runs; null gives each rank an equal part of the
    limits."""

    def open(self) -> Quota:
        """Open the counter of this quota."""
        return Quota(
            requests_per_minute=self.requests_per_minute,
            units_per_minute=self.tokens_per_minute,
            largest=self.tokens_per_question,
            calls=self.calls,
            cost=self.cost,
            file=self.file,
        )


class Prices(Section):
    """Prices of the endpoint in dollars per million tokens, for cost estimates and for ``quota.cost``."""

    input: NonNegative
    """Price of input tokens."""
    output: NonNegative
    """Price of output tokens."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float:
        """Return the cost of these tokens in dollars."""
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


_WAITS = ContextVar("_WAITS", default=True)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Ignore the key ``wait`` of judges that are opened in this context: checks report a missing server instead of waiting."""
    before = _WAITS.set(False)
    try:
        yield
    finally:
        _WAITS.reset(before)


class EndpointSettings(JudgeModel):
    """The settings of a model behind an OpenAI-compatible endpoint. ``Endpoint`` adds the client."""

    kind: Literal["endpoint"] = "endpoint"
    model: str
    """The model's name on the server."""
    base_url: VersionedAddress = "https://api.openai.com/v1"
    """Base URL of the server; ``/v1`` is added if it has no path."""
    key: Variable | None = "OPENAI_API_KEY"
    """Environment variable that contains the API key. The same name with ``_FILE`` appended may contain the path of a file with the
    key. null is for servers without a key."""
    typed: bool = True
    """Constrain answers to a JSON schema; false is for servers that do not support this, whose answers are read as free text."""
    image_format: Literal["png", "jpeg", "webp"] = Field(default="png", exclude_if=partial(operator.eq, "png"))
    """File format in which images are sent. ``png`` and ``webp`` are lossless; llama.cpp reads no ``webp``. ``jpeg``, quality 95,
    is smaller and changes pixels, so that its answers count as those of another judge."""
    guided: Literal["structured_outputs", "guided_choice"] | None = None
    """Request field that restricts an answer to a list of words: ``structured_outputs`` for vLLM 0.11 and later, ``guided_choice``
    for vLLM before 0.12; null sends a JSON schema."""
    concurrency: Count = 32
    """Maximum number of concurrent requests of each rank."""
    timeout: Positive = 60.0
    """Time limit of one attempt, in seconds."""
    deadline: Positive = 120.0
    """Time limit of a question, in seconds, including further attempts. A question that waits because of ``concurrency`` gives up
    if no question was answered for this time. The score of a question without an answer is missing."""
    attempts: Count = 5
    """Maximum number of attempts at one question, after which its score is missing. Attempts that the server postponed with
    Retry-After do not count."""
    pause: Positive = 0.5
    """Upper bound of the first pause between attempts, in seconds. The bound doubles with each attempt; the pause is drawn between
    0 and the bound."""
    longest_pause: Positive = 20.0
    """Largest upper bound of a pause, in seconds."""
    wait: NonNegative = Field(default=0.0, exclude_if=operator.not_)
    """Time in seconds to wait at the start for a server that does not answer yet, for example because it still loads its model; 0
    does not wait."""
    prices: Prices | None = None
    """Prices of the server; null estimates no costs."""
    quota: JudgeQuota | None = None
    """Limits on requests, tokens and cost; null sets none."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"base_url", "key", "concurrency", "timeout", "deadline", "attempts", "pause", "longest_pause", "wait", "prices", "quota"}
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.base_url.endswith("/chat/completions"):
            raise ValueError(f"base_url: the client adds /chat/completions; give {self.base_url.removesuffix('/chat/completions')}")
        if self.pause > self.longest_pause:
            raise ValueError(
                f"pause {self.pause:g} is above longest_pause {self.longest_pause:g}; increase longest_pause or decrease pause"
            )
        return self

    @property
    def start_wait(self) -> float:
        """Time in seconds to wait for the server when the client is opened: ``wait``, or 0 within ``without_waiting``."""
        return self.wait if _WAITS.get() else 0.0

    @property
    def description(self) -> str:
        """The model's name and the server's URL."""
        return f"{self.model} at {self.base_url}"

    def cost(self, *, input_tokens: float, output_tokens: float) -> float | None:
        """Return the cost of these tokens in dollars; None if no price is known."""
        return None if self.prices is None else self.prices.cost(input_tokens=input_tokens, output_tokens=output_tokens)

    def problems(self, path: str) -> Iterator[str]:
        """Yield a message if ``quota.cost`` is set and ``prices`` is not."""
        if self.quota is not None and self.quota.cost is not None and self.prices is None:
            yield f"{path}.quota.cost: the cost is computed from prices, and none are given; set {path.rpartition('.')[2]}.prices"

    def variables(self) -> Iterator[str]:
        """Yield the environment variable of the key, if there is one."""
        if self.key is not None:
            yield self.key

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Yield the variable of the key, and the variable of the headers that the ``openai`` package sends to every address."""
        if self.key is not None:
            yield self.key, self.base_url
        if HEADERS in os.environ:
            yield HEADERS, self.base_url
