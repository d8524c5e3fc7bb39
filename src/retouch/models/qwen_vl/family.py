"""The recipe's sections of Qwen's instruct models, policies that write text."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from retouch.models.base import Area
from retouch.models.language import PretrainedLanguageModel

if TYPE_CHECKING:
    import torch

    from retouch.models.common.loaded import LoadedLanguageModel
    from retouch.protocols import AutoregressiveModel


class QwenFamily(PretrainedLanguageModel):
    """Base class of the sections of Qwen's instruct models."""

    def load(self, source: Path | LoadedLanguageModel, *, device: torch.device, **options: Any) -> AutoregressiveModel:
        """Load the model from a local folder, or take a loaded one.

        ``options``: further arguments of ``load_writer``; by default, ``template`` has the enhancer's system prompt.
        """
        from retouch.models.common.chat_template import TURNS
        from retouch.models.qwen_vl.model import load_writer

        defaults = {"template": TURNS.format(system=enhancer_system_prompt(), user="{}")}
        settings = {"dtype": self.torch_dtype, "attention": self.attention, "device": device}
        writer: AutoregressiveModel = load_writer(source, **{**settings, **defaults, **options})
        return writer


class QwenLanguageModel(QwenFamily):
    """A Qwen instruct model: ``qwen-vl`` reads images (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), ``qwen`` does not (Qwen2.5, Qwen3).

    Sources: Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388).
    """

    kind: Literal["qwen-vl", "qwen"]
    system: str | None = None
    """System prompt; null takes the included prompt for enhancers, or the editor's template if the model writes for an editor."""
    area: Area | None = None
    """Area in pixels to which input images are resized; null keeps their size, or takes the editor's area if the model writes for
    an editor."""

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        from retouch.models.common.chat_template import TURNS

        options: dict[str, Any] = {"area": "as_is" if self.area is None else self.area}
        if self.system is not None:
            options["template"] = TURNS.format(system=self.system, user="{}")
        return self.load(self.fetch_weights(), device=device, gradient_checkpointing=gradient_checkpointing, **options)

    def editor_problems(self) -> Iterator[str]:
        if self.kind == "qwen":
            yield from super().editor_problems()
        if self.system is not None or self.area is not None:
            yield "policy.model.system, policy.model.area: a writer for an editor uses the editor's template and sizes; omit both"


def enhancer_system_prompt() -> str:
    """The system prompt for enhancing prompts: keep the subject, add style, lighting and technical terms, be concise."""
    return (files("retouch.models.qwen_vl") / "enhancer.txt").read_text(encoding="utf-8").strip()
