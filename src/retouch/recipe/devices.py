"""The recipe section ``devices``: the device of each part of a run, if a process uses several devices or shares a small one."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Section

Place: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")]


class Devices(Section):
    """A device for each part. ``cuda:N`` counts the GPUs of a rank. Each rank gets as many GPUs as are named here, in the order of
    the ranks on a machine."""

    policy: Place | None = None
    """Device of the policy; null uses ``device``."""
    renderer: Place | None = None
    """Device of the image model behind a writer; null uses the policy's device."""
    reward: Place | None = None
    """Device of the reward models that run in this process; null uses the policy's device."""
    offload: bool = False
    """Keep frozen parts in CPU memory while they are not used: the image model behind a writer, so that it and the policy can share
    a device, or the text encoders and the autoencoder of a denoising policy."""
    reference: Literal["cpu"] | None = Field(default=None, exclude_if=lambda place: place is None)
    """Where the frozen reference of a writer is kept if all weights train: ``cpu``, or null for the policy's device. From the CPU
    it is copied to the device for each microbatch."""
    weights: Literal["cpu"] | None = Field(default=None, exclude_if=lambda place: place is None)
    """Where the weights that ``sharding: fsdp2`` shards are kept while they are not used: ``cpu``, or null for the policy's device.
    Each block is copied to the device when it computes. The gradients and moments of these weights are then in CPU memory too."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Largest share of a GPU's memory that this process may use; null sets no limit."""
    empty_cache_every: Count | None = None
    """Steps between two releases of the memory that torch has cached; null never releases it."""

    @property
    def named(self) -> dict[str, str]:
        """The parts for which a device is set: name of the part to device."""
        parts = {"policy": self.policy, "renderer": self.renderer, "reward": self.reward}
        return {part: place for part, place in parts.items() if place is not None}
