"""The section of a recipe about where the parts of a run lie, for processes that use several devices or share a small one."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Section

Place: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")]


class Devices(Section):
    """A device for each part. ``cuda:N`` counts a rank's own GPUs: every rank has as many as are named here, the first ranks of a
    machine the first of them."""

    policy: Place | None = None
    """Device of the policy; null takes ``device``."""
    renderer: Place | None = None
    """The image model behind a writer; null is where the policy is."""
    reward: Place | None = None
    """Models that judge in this process; null is where the policy is."""
    offload: bool = False
    """Keep the image model in CPU memory while it renders nothing, so that it and the policy can share a device."""
    reference: Literal["cpu"] | None = Field(default=None, exclude_if=lambda place: place is None)
    """Where the reference of a writer whose weights all train waits while it is not asked: ``cpu``, or beside the policy. It comes
    over for each microbatch."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Most of a GPU's memory that this process may take, as a share; null takes what it needs."""
    empty_cache_every: Count | None = None
    """Steps after which memory that torch keeps for later is given back to the GPU; null keeps it."""

    @property
    def named(self) -> dict[str, str]:
        """The parts that have a device of their own."""
        parts = {"policy": self.policy, "renderer": self.renderer, "reward": self.reward}
        return {part: place for part, place in parts.items() if place is not None}
