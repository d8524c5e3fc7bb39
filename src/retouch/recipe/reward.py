"""The section of a recipe about its reward: one that judges here, one that asks a model or a server, or several of them."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_serializer

from retouch.config.section import Count, Positive, Share
from retouch.recipe.judges import Address, Judge
from retouch.recipe.reward_local import LocalReward
from retouch.recipe.reward_section import RewardSection


class RemoteReward(RewardSection):
    """Rewards that ``retouch serve`` hosts, at one or more addresses (docs/serving.md)."""

    kind: Literal["remote"]
    endpoints: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Addresses of servers that host the same rewards."""
    columns: dict[str, tuple[float, float]] | None = None
    """Columns that the servers must give, with their ranges, so that ``combine`` is checked when the recipe is read; null takes
    what the servers say when the run starts."""
    rewards: tuple[str, ...] | None = None
    """Which of the servers' rewards to ask; null asks all."""
    encoding: Literal["auto", "webp", "raw"] = "auto"
    """How pictures travel: raw pixels to this machine and lossless WebP to others, or one of the two."""
    batch: Count = 8
    """Samples in a request."""
    concurrency: Count = 4
    """Requests in flight at once to each endpoint, from each rank."""
    timeout: Positive = 60.0
    """Seconds that one attempt may take."""
    deadline: Positive = 120.0
    """Seconds in which a request must be answered, further attempts included; those that wait in line give up when nothing was
    answered for so long. What has no answer then is missing."""
    attempts: Count = 5
    """How often one request is tried."""
    retry_share: Share = 0.1
    """Further attempts, as a share of all requests."""
    hedge: bool = False
    """Ask a second endpoint when the first takes longer than 95 % of the latest requests."""
    hedge_share: Share = 0.05
    """Largest share of requests that are asked twice so."""
    samples_per_minute: Positive | None = None
    """Samples in any minute at most; null sets no limit."""
    requests_per_minute: Positive | None = None
    """Requests in any minute at most."""
    calls: Count | None = None
    """Requests in all; when they are spent the run ends with a checkpoint."""
    rate_file: str | None = None
    """File in which the processes of a machine keep count of these together; null gives each rank its share."""
    wait: Positive = 60.0
    """Seconds to wait for the first server to answer."""


Part: TypeAlias = Annotated[LocalReward | Judge | RemoteReward, Field(discriminator="kind")]


class Several(RewardSection):
    """Several rewards at once, each judging while the others do; the column ``alignment`` of the reward ``judge`` is
    ``judge/alignment``."""

    kind: Literal["several"]
    rewards: Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], Part], Field(min_length=1)]
    """The rewards, by names of your choice."""

    @field_serializer("rewards")
    def _parts(self, rewards: dict[str, Any]) -> dict[str, Any]:
        """Without what stands above them."""
        return {
            name: part.model_dump(mode="json", by_alias=True, exclude={"combine", "max_missing"}) for name, part in rewards.items()
        }


Reward: TypeAlias = Annotated[LocalReward | Judge | RemoteReward | Several, Field(discriminator="kind")]
