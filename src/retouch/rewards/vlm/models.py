"""The models that can answer a judge, as sections of a recipe: behind an address, or in this process. Their clients are in
``chat_client.py`` and ``local_model.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.kinds import Kinds
from retouch.config.section import Count
from retouch.rewards.facts import Device, LoadedModel, PathText
from retouch.rewards.vlm.base import JudgeModel
from retouch.rewards.vlm.endpoint_settings import EndpointSettings
from retouch.rewards.vlm.questions import JudgeClient

if TYPE_CHECKING:
    import torch

    from retouch.rewards.vlm.local_model import LocalJudge


class Endpoint(EndpointSettings):
    """A model behind an OpenAI-compatible address: OpenAI, vLLM, SGLang, llama.cpp."""

    def open(self, *, device: torch.device | str = "cpu") -> JudgeClient:
        """A client. ValueError: no key in the environment, no ``openai`` package (extra ``judge``), or no prices for a quota of
        cost."""
        from retouch.rewards.vlm.chat_client import ChatClient

        return ChatClient(self)


class InProcess(JudgeModel):
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL in the training process, on its own device."""

    kind: Literal["in_process"] = "in_process"
    path: PathText
    """Folder of the weights, or their id in the Hugging Face cache."""
    device: Device = None
    """Where the model runs; null takes the run's device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the weights."""
    batch: Count = Field(default=1, exclude_if=lambda batch: batch == 1)
    """Questions that are answered in one forward pass. More is faster and takes more memory; answers differ by rounding."""

    @property
    def description(self) -> str:
        """The weights."""
        return self.path

    def open(self, *, device: torch.device | str = "cpu") -> LocalJudge:
        """The model, loaded. ValueError: its weights are not on this machine, or are of another kind of model."""
        import torch

        from retouch.rewards.vlm.local_model import LocalJudge

        return LocalJudge(self.path, device=self.device or device, dtype=getattr(torch, self.dtype), batch=self.batch)

    def loaded_models(self) -> Iterator[LoadedModel]:
        """The model."""
        yield LoadedModel(self.path, self.dtype, self.device)


JUDGE_MODELS = Kinds(
    "judge",
    {
        "endpoint": "retouch.rewards.vlm.models:Endpoint",
        "in_process": "retouch.rewards.vlm.models:InProcess",
    },
)
"""All kinds of models that answer judges."""
AnyJudgeModel: TypeAlias = Annotated[JudgeModel, JUDGE_MODELS]
"""A model of any kind, as the type of a field."""
