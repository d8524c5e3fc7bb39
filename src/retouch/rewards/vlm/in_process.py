"""A judge that runs in the run's own process, as a section of a recipe. Its model is in ``local_model.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from retouch.rewards.facts import Device, LoadedModel, PathText
from retouch.rewards.vlm.base import JudgeModel

if TYPE_CHECKING:
    import torch

    from retouch.rewards.vlm.local_model import LocalJudge


class InProcess(JudgeModel):
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL in the run's own process, on a device of its own; it answers one question after
    another."""

    kind: Literal["in_process"] = "in_process"
    path: PathText
    """Folder of the weights, or their id in the Hugging Face cache."""
    device: Device = None
    """Where the model runs; null takes the run's device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the weights."""

    @property
    def description(self) -> str:
        """The weights."""
        return self.path

    def open(self, *, device: torch.device | str = "cpu") -> LocalJudge:
        """The model, loaded. ValueError: its weights are not on this machine, or are of another kind of model."""
        import torch

        from retouch.rewards.vlm.local_model import LocalJudge

        return LocalJudge(self.path, device=self.device or device, dtype=getattr(torch, self.dtype))

    def loaded_models(self) -> Iterator[LoadedModel]:
        """The model."""
        yield LoadedModel(self.path, self.dtype, self.device)
