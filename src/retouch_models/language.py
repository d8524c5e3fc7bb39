"""The recipe's sections of language models: Qwen's instruct models write text, Emu3 and Janus-Pro write images as tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.config.section import Pixels
from retouch.models.base import CONFIGS, TURNS, Area, PartConfigs, PretrainedLanguageModel, Size, TaskInputs, TokenKind
from retouch.models.pretrained import MODEL, TOKENIZER, fetch_weights, find_weights
from retouch.records.files import read_json

if TYPE_CHECKING:
    import torch

    from retouch.models.loaded import LoadedLanguageModel
    from retouch.protocols import AutoregressiveModel


class QwenFamily(PretrainedLanguageModel):
    """Base class of the sections of Qwen's instruct models."""

    def load(self, source: Path | LoadedLanguageModel, *, device: torch.device, **options: Any) -> AutoregressiveModel:
        """Load the model from a local folder, or take a loaded one.

        ``options``: further arguments of ``load_writer``; by default, ``template`` has the enhancer's system prompt.
        """
        from retouch_models.qwen_vl import load_writer

        # The prompt says: keep the subject, add style, lighting and technical terms, be concise.
        enhancer = (CONFIGS / "enhancer.txt").read_text(encoding="utf-8").strip()
        defaults = {"template": TURNS.format(system=enhancer, user="{}")}
        settings = {"dtype": self.torch_dtype, "attention": self.attention, "device": device}
        return load_writer(source, **{**settings, **defaults, **options})


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
        options: dict[str, Any] = {"area": "as_is" if self.area is None else self.area}
        if self.system is not None:
            options["template"] = TURNS.format(system=self.system, user="{}")
        return self.load(self.fetch_weights(), device=device, gradient_checkpointing=gradient_checkpointing, **options)

    def editor_problems(self) -> Iterator[str]:
        if self.kind == "qwen":
            yield from super().editor_problems()
        if self.system is not None or self.area is not None:
            yield "policy.model.system, policy.model.area: a writer for an editor uses the editor's template and sizes; omit both"


class Emu3Family(PretrainedLanguageModel):
    """Base class of the sections of Emu3 and of the playground's tiny Emu3."""

    think: bool = False
    """Allow text before the image ("Let's think step by step")."""
    grammar: bool = True
    """Only complete images of the model's size can be generated; with false, the model may generate malformed images, which get the
    lowest reward."""

    takes = TaskInputs(images=(1, 1))

    @property
    def token_kinds(self) -> frozenset[TokenKind]:  # type: ignore[override]
        return frozenset({"text", "vision"} if self.think else {"vision"})

    @property
    def image_grammar(self) -> bool:  # type: ignore[override]
        return self.grammar

    def load(self, source: Path | LoadedLanguageModel, *, device: torch.device, **options: Any) -> AutoregressiveModel:
        """Load the model from local folders, or take a loaded one. ``options``: further arguments of ``load_emu3``."""
        from retouch_models.emu3 import DRAW, THINK, load_emu3

        return load_emu3(
            source,
            size=self.planned_size,
            prefill=THINK if self.think else DRAW,
            grammar=self.grammar,
            dtype=self.torch_dtype,
            device=device,
            attention=self.attention,
            **options,
        )

    def describe_parts(self, folder: Path | None, autoencoder: Path | None) -> PartConfigs:
        """Describe ``writer`` and ``autoencoder`` from their folders, or as published if one of them is not on this machine."""
        from retouch_models.emu3 import parts_of_emu3

        if folder is None or autoencoder is None:
            parts: PartConfigs = read_json(CONFIGS / "emu3.json")["parts"]
            return parts
        return parts_of_emu3(folder, autoencoder=autoencoder)


class Emu3Model(Emu3Family):
    """Emu3 as an editor (EARL): it reads the source image as tokens, and generates the edited image as tokens.

    Source: Emu3 (arXiv 2409.18869) and EARL (arXiv 2508.01119); weights BAAI/Emu3-Gen.
    """

    kind: Literal["emu3"] = "emu3"
    path: str
    """Folder or Hugging Face id of the model, in transformers' layout or in the original one (BAAI's, EARL's checkpoints)."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; null takes the model's. The original tokenizer is Python code, which is never executed;
    Emu3-community/Emu3-Gen-hf has a converted one."""
    autoencoder: str | None = None
    """Folder or id of the autoencoder; null takes the model's. In the original layout, it is a separate repository:
    BAAI/Emu3-VisionTokenizer. Its codes are always computed in fp32."""
    size: Pixels = (256, 256)
    """Height and width of the images in pixels."""

    def fetch_weights(self) -> Any:
        for path, files in ((self.tokenizer, TOKENIZER), (self.autoencoder, MODEL)):
            if path is not None:
                fetch_weights(path, files)
        return super().fetch_weights()

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        return self.load(
            self.fetch_weights(),
            tokenizer=None if self.tokenizer is None else fetch_weights(self.tokenizer, TOKENIZER),
            autoencoder=None if self.autoencoder is None else fetch_weights(self.autoencoder, MODEL),
            device=device,
            gradient_checkpointing=gradient_checkpointing,
        )

    def find_weights(self) -> tuple[Path | None, bool]:
        folder, found = super().find_weights()
        tokenizer_found = self.tokenizer is None or find_weights(self.tokenizer, TOKENIZER) is not None
        autoencoder_found = self.autoencoder is None or find_weights(self.autoencoder, MODEL) is not None
        return folder, found and tokenizer_found and autoencoder_found

    def describe(self, folder: Path | None) -> PartConfigs:
        return self.describe_parts(folder, folder if self.autoencoder is None else find_weights(self.autoencoder, MODEL))

    @property
    def planned_size(self) -> Size:
        return self.size


class JanusModel(PretrainedLanguageModel):
    """Janus-Pro, text to image: every completion has exactly as many codes as one image of the model.

    Source: Janus-Pro (arXiv 2501.17811); weights deepseek-community/Janus-Pro-1B and -7B.
    """

    kind: Literal["janus"] = "janus"
    weights: str | None = None
    """Folder ``writer`` of an export of full weights, which replaces the weights of the trained modules."""

    takes = TaskInputs(images=(0, 0))
    token_kinds: ClassVar[frozenset[TokenKind]] = frozenset({"vision"})
    image_grammar = True

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        from retouch_models.janus import load_janus

        return load_janus(
            self.fetch_weights(),
            weights=None if self.weights is None else Path(self.weights),
            dtype=self.torch_dtype,
            attention=self.attention,
            device=device,
            gradient_checkpointing=gradient_checkpointing,
        )

    def describe(self, folder: Path | None) -> PartConfigs | None:
        """None: the model has no dry run."""
        return None
