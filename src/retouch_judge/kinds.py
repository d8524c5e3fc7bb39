"""The kinds of ``judge`` sections: a model behind an endpoint, or a model in this process, with the client of each."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Kinds
from retouch.models.base import Bits
from retouch.rewards.base import Device, LoadedModel, PathText
from retouch_judge.models import EndpointSettings, JudgeModel
from retouch_judge.questions import JudgeClient

if TYPE_CHECKING:
    import torch


class Endpoint(EndpointSettings):
    """A model behind an OpenAI-compatible endpoint: OpenAI, vLLM, SGLang, llama.cpp."""

    def open(self, *, device: torch.device | str = "cpu") -> JudgeClient:
        """Open a client. Raises ValueError as ``ChatClient`` does: for example if there is no key in the environment, or the
        ``openai`` package (extra ``judge``) is not installed."""
        try:
            from retouch_judge.chat_client import ChatClient
        except ModuleNotFoundError as error:
            if error.name != "openai":
                raise
            raise ValueError("asking a judge needs the openai package: pip install 'retouch[judge]'") from None
        return ChatClient(self)


class InProcess(JudgeModel):
    """A Qwen2-VL, Qwen2.5-VL or Qwen3-VL model in the training process."""

    kind: Literal["in_process"] = "in_process"
    path: PathText
    """Folder of the weights, or their id in the Hugging Face cache."""
    device: Device = None
    """Where the model runs; null takes the run's device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the weights."""
    quantize: Bits | None = Field(default=None, exclude_if=operator.not_)
    """Quantise the linear layers of the blocks, as ``policy.base.quantize`` does. It is another judge than that of the whole
    weights: `retouch tools audit` measures it."""
    batch: Count = Field(default=1, exclude_if=lambda batch: batch == 1)
    """Maximum number of questions in one forward pass. Larger batches are faster and need more memory; answers differ by
    rounding."""

    @property
    def description(self) -> str:
        """The folder or the id of the weights."""
        return self.path

    def open(self, *, device: torch.device | str = "cpu") -> JudgeClient:
        """Load the model. Raises ValueError if its weights are not on this machine, or are of another type of model."""
        import torch

        from retouch_judge.local_model import LocalJudge

        kind = getattr(torch, self.dtype)
        return LocalJudge(self.path, device=self.device or device, dtype=kind, batch=self.batch, bits=self.quantize)

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the model."""
        yield LoadedModel(self.path, self.dtype, self.device, {"8bit": 0.6, "4bit": 0.4}.get(self.quantize or "", 1.0))


JUDGE_MODELS = Kinds(
    "judge",
    {},
    with_wings=True,
    other_names=dict.fromkeys(("openai", "vllm", "sglang", "llama.cpp"), "'endpoint', with the server's base_url"),
)
"""All kinds of ``judge`` sections."""
AnyJudgeModel: TypeAlias = Annotated[JudgeModel, JUDGE_MODELS]
"""The type of a field that contains a ``judge`` section of any kind."""
