"""Qwen-Image, Qwen-Image-Edit and Edit-Plus conditioned on an instruction and a language model's response to it.

The encoder reads the pipeline's template with the task in it, which ends in an open assistant turn, then the response's ids as they
were sampled, then the token that closes the turn. An empty response adds nothing, not even the closing token. The beginning of the
template is dropped as in the pipeline, so the image model sees [user, images, instruction, assistant, response].
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.models.offloading import parts_of
from retouch.models.parts import evaluating
from retouch.types import Conditioning, Task
from retouch_models.chat_template import VISION, Tokens
from retouch_models.qwen_image.model import Prepared, QwenFlow, QwenImageEdit, QwenImageEditPlus, QwenText
from retouch_models.qwen_vl import STOP, QwenWriter, VisionModel

CLOSING = "<|im_end|>"


WeightContext: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, eq=False)
class ResponseEncoder:
    """A Qwen2.5-VL that encodes responses, in eval mode and without gradient.

    ``published`` opens a context in which ``module`` has the weights with which the image model was trained; the negative branch of
    guidance is encoded in it, so that it does not change during training. ``reading`` opens a context around every encoding.
    """

    module: Qwen2_5_VLForConditionalGeneration
    published: WeightContext = nullcontext
    reading: WeightContext = nullcontext

    @classmethod
    def frozen(cls, module: Qwen2_5_VLForConditionalGeneration) -> "ResponseEncoder":
        """A separate encoder, which is frozen here: an image depends on the response, but not on the policy's weights."""
        module.requires_grad_(False).eval()
        return cls(module)


def encoder_for(
    editor: QwenFlow, writer: nn.Module, *, frozen: bool, guided: bool, published: WeightContext | None
) -> ResponseEncoder:
    """Return the encoder of responses: the editor's text encoder (``frozen``) or the policy's module ``writer``.

    ``guided``: a negative branch is encoded too. ``published``: opens a context with the policy's weights from before training, if
    they are kept. Raises ValueError if the editor cannot use the policy's hidden states.
    """
    if frozen and editor.text.encoder is not writer:
        return ResponseEncoder.frozen(editor.text.encoder)
    if not isinstance(writer, Qwen2_5_VLForConditionalGeneration):
        raise ValueError(f"renderer.encoder: the editor reads states of a Qwen2.5-VL, not of {type(writer).__name__}; use frozen")
    config: Any = editor.module.config
    width = config.joint_attention_dim
    if writer.get_input_embeddings().weight.shape[1] != width:
        raise ValueError(f"renderer.encoder: the editor reads states of width {width}, and the writer has others; use frozen")
    if not guided and not frozen:
        return ResponseEncoder(writer)
    assert published is not None, "a negative branch and a frozen encoder need the policy's weights from before training"
    # A frozen encoder that is the policy's own module reads everything without the adapter, not only the negative branch.
    return ResponseEncoder(writer, published, published if frozen else nullcontext)


def share_encoder(editor: QwenFlow, writer: nn.Module, *, policy_encodes: bool, base_frozen: bool, device: torch.device) -> None:
    """Replace the editor's text encoder by the policy's module ``writer`` if possible, so that the weights are in memory once, and
    move the editor's other parts to ``device``.

    It is possible if the policy encodes responses, or if the policy's base weights do not train (``base_frozen``: a LoRA) and both
    modules have the same class, attention and weights. Call it before training.
    """
    if policy_encodes or (base_frozen and _interchangeable(editor.text.encoder, writer)):
        editor.text.encoder = writer
    for part in parts_of(editor):
        if part is not writer:
            part.to(device)


def _interchangeable(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same class, attention and weights (types and values)."""
    attentions = [getattr(getattr(module, "config", None), "_attn_implementation", None) for module in (one, other)]
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    if type(one) is not type(other) or attentions[0] != attentions[1] or mine.keys() != theirs.keys():
        return False
    return all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name].to(tensor.device)) for name, tensor in mine.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class QwenContext:
    """A task without its response: its tokens, source latents and sizes. ``room``: maximum number of ids of a response."""

    prepared: Prepared
    room: int

    @property
    def size(self) -> tuple[tuple[int, int, int], ...]:
        """Sizes of the output and the sources in tokens; contexts of equal size can be sampled in one batch."""
        grids: tuple[tuple[int, int, int], ...] = self.prepared.shared["grids"]
        return grids

    @property
    def length(self) -> int:
        """Number of tokens before the response."""
        return self.prepared.tokens["input_ids"].shape[1]


class QwenResponses:
    """An image model that is conditioned on a task and a response, for ``retouch_models.responses``.

    ``encoder`` replaces the editor's own text encoder and uses the editor's tokenizer, template and sizes. Its states are those of
    the last layer after the final norm. The constructor freezes the autoencoder.
    """

    def __init__(self, editor: QwenFlow, encoder: ResponseEncoder) -> None:
        self.model = editor
        self.encoder = encoder
        words = editor.text
        template = words.template.head + "{}" + words.template.tail
        self.text = QwenText(encoder.module, words.tokenizer, template=template, image_processor=words.image_processor)
        editor.latents.vae.requires_grad_(False).eval()
        config = encoder.module.config
        self._closing: int = words.tokenizer.convert_tokens_to_ids(CLOSING)
        self._vocabulary: int = encoder.module.get_input_embeddings().weight.shape[0]
        self._image_ids = {config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id}

    def prepare(self, task: Task) -> QwenContext:
        """Compute the part of a task's conditioning that does not depend on the response.

        Raises ValueError if the task leaves no room for a response.
        """
        with torch.no_grad():
            prepared = self.model.prepare([task])
        positions: Any = self.model.module.get_submodule("pos_embed")
        table: int = positions.pos_freqs.shape[0]
        start = max(side // 2 for grid in prepared.shared["grids"] for side in grid[1:])
        length = prepared.tokens["input_ids"].shape[1]
        room = table - start - (length - self.text.prefix) - 1
        if room < 1:
            raise ValueError(
                f"the {length} tokens of task {task.id!r} fill the transformer's {table} rotary positions; "
                "shorten its instruction, or reduce its images"
            )
        return QwenContext(prepared, room)

    def accepts(self, context: QwenContext, response: Sequence[int]) -> bool:
        """Whether these ids can be encoded: the encoder knows all ids, none is an image token, and there are at most ``room``."""
        return len(response) <= context.room and all(0 <= k < self._vocabulary and k not in self._image_ids for k in response)

    def encode(self, contexts: Sequence[QwenContext], responses: Sequence[Sequence[int]]) -> list[Float[Tensor, "_ d"]]:
        """Encode each context with its response, in one forward pass of the encoder; sizes and lengths may differ."""
        rows: list[Tokens] = []
        for context, response in zip(contexts, responses, strict=True):
            ids = context.prepared.tokens["input_ids"]
            more = ids.new_tensor([[*response, self._closing]] if len(response) else [[]])
            rows.append({**context.prepared.tokens, "input_ids": torch.cat([ids, more], dim=1)})
        return self._embed(rows)

    def encode_negative(self, tasks: Sequence[Task]) -> list[Float[Tensor, "_ d"]]:
        """Encode the pipeline's negative branch (the same images, if any, and the instruction " ") with the published weights."""
        tokens = [self.model.tokenise([task], instructions=[" "]) for task in tasks]
        with self.encoder.published():
            return self._embed(tokens)

    def condition(self, contexts: Sequence[QwenContext], states: Sequence[Float[Tensor, "_ d"]]) -> Conditioning:
        """Build a conditioning from contexts of equal size, padded on the right, on the transformer's device."""
        shared = contexts[0].prepared.shared
        assert all(context.size == contexts[0].size for context in contexts)
        device = next(self.model.module.parameters()).device
        lengths = torch.tensor([len(row) for row in states], device=device)
        embeds = pad_sequence([row.to(device) for row in states], batch_first=True)
        mask = torch.arange(embeds.shape[1], device=device) < lengths[:, None]
        tensors = {"embeds": embeds, "mask": mask}
        source = [context.prepared.source.to(device) for context in contexts if context.prepared.source is not None]
        if source:
            tensors["source"] = torch.cat(source)
        return Conditioning(tensors, frozenset({"embeds", "mask"}), shared)

    def _embed(self, rows: Sequence[Tokens]) -> list[Float[Tensor, "_ d"]]:
        joined = _joined(rows, pad=self.text.tokenizer.pad_token_id)
        with self.encoder.reading(), evaluating(self.encoder.module):
            embeds, mask = self.text.embed(joined)
        return [row[real] for row, real in zip(embeds, mask, strict=True)]


def with_prompts_of(editor: QwenFlow, writer: QwenWriter) -> QwenWriter:
    """Return the writer with the prompts of ``writer_for``. Raises ValueError if it has another tokenizer than the editor."""
    if writer.template.tokenizer.get_vocab() != editor.text.tokenizer.get_vocab():
        raise ValueError("policy.model: its tokenizer differs from the editor's; use a model with the editor's tokenizer")
    module: Any = writer.module
    return writer_for(editor, module, gradient_checkpointing=writer.gradient_checkpointing)


def writer_for(
    editor: QwenFlow, module: VisionModel, *, stop: Sequence[str] = STOP, gradient_checkpointing: bool = False
) -> QwenWriter:
    """Return a writer whose prompts are exactly what ``QwenResponses`` reads before a response: same template, images, tokenizer.

    So a response is encoded in the context in which it was sampled.
    """
    words = editor.text
    return QwenWriter(
        module,
        words.tokenizer,
        template=words.template.head + "{}" + words.template.tail,
        image_processor=words.image_processor,
        image_block="Picture {}: " + VISION if isinstance(editor, QwenImageEditPlus) else "",
        area=editor.condition_area if isinstance(editor, QwenImageEdit) else "as_is",
        stop=stop,
        gradient_checkpointing=gradient_checkpointing,
    )


def _joined(rows: Sequence[Tokens], *, pad: int) -> Tokens:
    """Join single rows without padding into one batch, padded on the right."""
    ids = [row["input_ids"][0] for row in rows]
    joined = {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    vision = [name for name in ("pixel_values", "image_grid_thw") if name in rows[0]]  # text to image has none
    return joined | {name: torch.cat([row[name] for row in rows]) for name in vision}
