"""The keys of a judge behind an OpenAI-compatible address, as its client reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, model_validator

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
    """The most that the endpoint is asked, by all ranks together; a budget that is spent ends the run with a checkpoint."""

    requests_per_minute: Positive | None = None
    """Requests in any minute."""
    tokens_per_minute: Positive | None = None
    """Tokens in any minute, read and written."""
    tokens_per_question: Positive = 8000.0
    """Most tokens that one question takes: they count until its answer says how many it took."""
    calls: Count | None = None
    """Requests in all."""
    cost: Positive | None = None
    """Dollars in all, by ``prices``."""
    file: PathText | None = None
    """File in which the processes of a machine count together, and from run to run; null gives each rank its share."""

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
    """What the endpoint charges, in dollars for a million tokens: for estimates, and for a quota of cost."""

    input: NonNegative
    """For tokens that are read."""
    output: NonNegative
    """For tokens that are written."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float:
        """What so many tokens cost in dollars."""
        return (self.input * input_tokens + self.output * output_tokens) / _MILLION


class EndpointSettings(JudgeModel):
    """Which model to ask, and how; ``Endpoint`` asks it."""

    kind: Literal["endpoint"] = "endpoint"
    model: str
    """The model's name there."""
    base_url: VersionedAddress = "https://api.openai.com/v1"
    """The address; an address of a server alone, ``http://host:4877``, gets ``/v1``."""
    key: Variable | None = "OPENAI_API_KEY"
    """Environment variable that holds the key or, with ``_FILE`` after its name, the path of a file that does; null is for servers
    without a key."""
    typed: bool = True
    """Answers are constrained to a JSON schema; false is for servers that cannot, whose answers are read as free text."""
    guided: Literal["structured_outputs", "guided_choice"] | None = None
    """The field in which the server takes the few answers that a vote may have: vLLM's from 0.11 on, or its former one, which 0.12
    has dropped; null sends them as a schema."""
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
    """Longest first pause between attempts, in seconds; it doubles, and the pause is drawn between 0 and that."""
    longest_pause: Positive = 20.0
    """Longest pause of all."""
    prices: Prices | None = None
    """What it charges; null leaves costs out of estimates."""
    quota: JudgeQuota | None = None
    """The most that it is asked; null sets no limit."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"base_url", "key", "concurrency", "timeout", "deadline", "attempts", "pause", "longest_pause", "prices", "quota"}
    )

    @model_validator(mode="after")
    def _pauses_grow(self) -> Self:
        if self.pause > self.longest_pause:
            raise ValueError(
                f"pause {self.pause:g} is above longest_pause {self.longest_pause:g}; give a longest pause that is longer"
            )
        return self

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
