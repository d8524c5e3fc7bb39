"""The encoder that reads a response for the image model: the image model's text encoder, or the policy that wrote the response."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration

from retouch.models.qwen_image.model import QwenFlow


@dataclass(frozen=True, slots=True, eq=False)
class ResponseEncoder:
    """A Qwen2.5-VL that encodes responses, in eval mode and without gradient.

    ``published`` opens a context in which ``module`` has the weights with which the image model was trained; the negative branch of
    guidance is encoded in it, so that it does not change during training. ``reading`` opens a context around every encoding.
    """

    module: Qwen2_5_VLForConditionalGeneration
    published: Callable[[], AbstractContextManager[None]] = nullcontext
    reading: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def frozen(cls, module: Qwen2_5_VLForConditionalGeneration) -> "ResponseEncoder":
        """A separate encoder, which is frozen here: an image depends on the response, but not on the policy's weights."""
        module.requires_grad_(False).eval()
        return cls(module)

    @classmethod
    def without_adapter(
        cls, module: Qwen2_5_VLForConditionalGeneration, *, published: Callable[[], AbstractContextManager[None]]
    ) -> "ResponseEncoder":
        """A frozen encoder that shares its weights with the policy: the policy's module, always inside ``published``."""
        return cls(module, published, published)

    @classmethod
    def policy(
        cls, module: Qwen2_5_VLForConditionalGeneration, *, published: Callable[[], AbstractContextManager[None]]
    ) -> "ResponseEncoder":
        """The policy's module with its current weights, so that images change when the policy is trained.

        ``published``: for example ``functools.partial(copies.using, "reference")``.
        """
        return cls(module, published)


def encoder_for(
    editor: QwenFlow,
    writer: nn.Module,
    *,
    frozen: bool,
    guided: bool,
    published: Callable[[], AbstractContextManager[None]] | None,
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
    made = ResponseEncoder.without_adapter if frozen else ResponseEncoder.policy
    return made(writer, published=published)


def share_encoder(editor: QwenFlow, writer: nn.Module, *, policy_encodes: bool, base_frozen: bool) -> None:
    """Replace the editor's text encoder by the policy's module ``writer`` if possible, so that the weights are in memory once.

    It is possible if the policy encodes responses, or if the policy's base weights do not train (``base_frozen``: a LoRA) and both
    modules have the same class, attention and weights. Call it before training, and before the editor is moved to its device.
    """
    if policy_encodes or (base_frozen and _interchangeable(editor.text.encoder, writer)):
        editor.text.encoder = writer


def _interchangeable(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same class, attention and weights (types and values)."""
    if type(one) is not type(other) or _attention(one) != _attention(other):
        return False
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    if mine.keys() != theirs.keys():
        return False
    return all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name].to(tensor.device)) for name, tensor in mine.items()
    )


def _attention(module: nn.Module) -> object:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)
