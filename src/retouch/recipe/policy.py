"""Sections of a recipe about the policy: the model, which of its weights are trained, and their running average."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from retouch.config.section import Count, Section
from retouch.models.base import Bits, ImageModel, LanguageModel
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.models.train import FullWeights, IpAdapter, Lora

if TYPE_CHECKING:
    import torch
    from torch import nn

    from retouch.protocols import AutoregressiveModel, DenoisingModel


class Ema(Section):
    """A running average of the trained weights, used for evaluation and export."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Share of the average that is kept at each update. Early in a phase a smaller share is kept: at most
    (1 + n) / (10 + n) after n optimizer steps of the phase."""
    every: Count = 1
    """Optimizer steps between updates."""


class LanguageModelBase(Section):
    """How the frozen weights are stored. Trained weights, optimizer state and log-probabilities are not affected."""

    quantize: Bits | None = None
    """Quantise the linear layers of the blocks: with ``8bit`` they take half the memory of bfloat16 (torchao's int8), with ``4bit``
    a quarter (bitsandbytes' NF4). Weights of 16 bits exist for one product at a time; in 8 bits without ``gradient_checkpointing``,
    they are also kept for the backward pass. Needs ``pip install 'retouch[quantized]'``."""


class DenoisingBase(LanguageModelBase):
    """How the frozen weights are stored. Trained weights, optimizer state and log-probabilities are not affected."""

    text_encoders: Bits | None = None
    """The same for the text encoders. It changes the prompt embeddings with which the policy trains, so it has a key of its own;
    where prompts are known, ``prompt_embeddings: 'cached'`` saves more."""


class DenoisingPolicyKeys(Section):
    """A flow-matching model whose actions are denoising steps."""

    kind: Literal["denoising"]
    model: Annotated[ImageModel, IMAGE_MODELS]
    """The model."""
    train: Annotated[FullWeights | Lora | IpAdapter, Field(discriminator="kind")]
    """Which weights of the model are trained."""
    base: DenoisingBase | None = Field(default=None, exclude_if=operator.not_)
    """How the frozen weights are stored; null stores them in the model's ``dtype``."""
    ema: Ema | None = None
    """Average of the trained weights; null keeps none."""
    gradient_checkpointing: bool | Literal["cpu"] = False
    """Recompute activations in the backward pass: less memory, about a third more time. ``cpu`` also keeps the inputs of the blocks
    in CPU memory until then, with equal results."""
    prompt_embeddings: Literal["live", "cached"] = Field(default="live", exclude_if=partial(operator.eq, "live"))
    """``live`` encodes the prompts in every rollout, with the text encoders on the policy's device; ``cached`` encodes each prompt
    only once, separately, and stores the result on disk, with the text encoders in CPU memory. The prompts of the run's steps and
    held-out tasks are encoded before the transformer is on the device. The results differ by rounding."""
    attention: str | None = Field(default=None, exclude_if=operator.not_)
    """Attention backend of diffusers in the transformer, such as ``flash`` or ``_flash_3``. The backend is tried before anything is
    loaded, and `retouch doctor` names the backends that can train here. Null uses torch's FlashAttention, or its
    memory-efficient attention for masks and fp32. cuDNN's attention (``_native_cudnn``) is a few percent faster on Hopper, but its
    backward pass can end the process with an illegal memory access. FlashAttention backends accept no mask, but Qwen-Image needs a
    mask for batches of prompts of unequal length. Ignored when a trained policy is used for inference."""
    compile: Literal["regional"] | None = Field(default=None, exclude_if=operator.not_)
    """``regional`` compiles the transformer's blocks with torch.compile; blocks of the same structure are compiled once. This takes
    some minutes in the first run, and seconds in later ones, which read a cache; then there are fewer and larger kernels. It pays
    in runs of some hundred steps. Weights, checkpoints and exports stay the same. Ignored in inference."""

    is_autoregressive: ClassVar[bool] = False
    """Whether the actions of the policy are tokens."""
    entropy: ClassVar[bool] = False
    token_kinds: ClassVar[frozenset[str] | None] = None
    """Kinds of tokens that the policy generates; None if it generates none, and for an imported model, whose kinds are unknown."""

    def build_model(
        self,
        *,
        device: torch.device,
        offload: bool = False,
        swap_blocks: int = 0,
        prepare: Callable[[DenoisingModel], None] | None = None,
    ) -> DenoisingModel:
        """Load the model, which also takes reference images if an IP-Adapter is trained. Downloads missing files.

        ``offload``: keep the text encoders and the autoencoder in CPU memory while they are not used. ``swap_blocks``: the
        number of the transformer's last blocks that stay in CPU memory. ``prepare``: with cached prompt embeddings, called with the
        model before its transformer is on the device."""
        dtype, cached = getattr(self.model, "dtype", "float32"), self.prompt_embeddings == "cached"
        if offload or cached or swap_blocks or self.base is not None:
            from retouch.models.offloading import build_offloaded

            waits: dict[str, Any] = {"offload": offload, "cache_prompts": cached, "swap_blocks": swap_blocks}
            model = build_offloaded(self.model, device=device, **waits, prepare=prepare, base=self.base)
        else:
            model = self.model.build(device=device)
        return self.train.with_inputs(model, dtype=dtype, device=device)

    def make_trainable(self, module: nn.Module, *, seed: int) -> None:
        """Make the weights trainable that ``train`` selects, and freeze the rest of the module.

        A LoRA that an earlier run in this process added is removed. Raises ValueError for a LoRA of another origin.
        """
        if getattr(module, "peft_config", None):
            from retouch.models.lora import remove_lora

            remove_lora(module, key="model.transformer")
        self.train.make_trainable(module, targets=self.model.targets_in(module), seed=seed)
        if self.gradient_checkpointing:
            from retouch.models.kernels import checkpoint_in_cpu_memory

            kept = [checkpoint_in_cpu_memory] if self.gradient_checkpointing == "cpu" else []
            # A module without gradient checkpointing raises a clear error itself.
            module.enable_gradient_checkpointing(*kept)  # type: ignore[operator]
        if self.attention is not None or self.compile is not None:
            from retouch.models.kernels import compile_blocks, set_attention

            if self.attention is not None:
                set_attention(module, self.attention)
            if self.compile is not None:
                compile_blocks(module)

    def require_kernels(self, device: torch.device) -> None:
        """Raise ValueError if the attention backend or the quantised layers cannot train on the device, or nothing can be compiled
        for it."""
        _require_quantizers(self, device)
        if self.attention is not None or self.compile is not None:
            from retouch.models.kernels import require_backend, require_compiler

            if self.attention is not None:
                require_backend(self.attention, device=device, dtype=getattr(self.model, "dtype", "float32"))
            if self.compile is not None:
                require_compiler(device)

    def for_inference(self) -> DenoisingPolicyKeys:
        """These keys with torch's own kernels, which every machine has."""
        return self.model_copy(update={"attention": None, "compile": None})


class LanguageModelLora(Lora):
    """Low-rank adapters on the language model's attention; the base weights are frozen and serve as the reference."""

    rank: Count = 32
    """Inner width of each adapter."""


class AutoregressivePolicyKeys(Section):
    """A language model whose actions are tokens; a renderer makes an image from each completion."""

    kind: Literal["autoregressive"]
    model: Annotated[LanguageModel, LANGUAGE_MODELS]
    """The language model."""
    train: Annotated[FullWeights | LanguageModelLora, Field(discriminator="kind")] = LanguageModelLora(kind="lora")
    """Which weights of the model are trained."""
    base: LanguageModelBase | None = Field(default=None, exclude_if=operator.not_)
    """How the frozen weights are stored; null stores them in the model's ``dtype``."""
    ema: Ema | None = None
    """Average of the trained weights; null keeps none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time. Each row then computes its prompt separately."""
    mask_truncated: bool = False
    """Leave completions that were truncated at ``rollout.max_new_tokens`` out of the loss."""
    compile: Literal["regional"] | None = Field(default=None, exclude_if=operator.not_)
    """``regional`` compiles the decoder layers with torch.compile; layers of the same structure are compiled once. Only calls
    without a cache are compiled: the update with ``gradient_checkpointing``, which is required. Generation is not compiled."""
    logits_at_once: Count = 256
    """Tokens whose logits exist at once in an update; changes memory and time only."""
    entropy: bool = False
    """Also measure the entropy of the tokens' distributions: ``policy/entropy`` in the metrics."""

    is_autoregressive: ClassVar[bool] = True

    @property
    def token_kinds(self) -> frozenset[str] | None:
        return self.model.token_kinds

    def build_model(self, *, device: torch.device) -> AutoregressiveModel:
        """Load the language model. Downloads files that are not on this machine."""
        if self.base is None or self.base.quantize is None:
            return self.model.build(device=device, gradient_checkpointing=self.gradient_checkpointing)
        import torch

        from retouch.models.parts import sharded_root
        from retouch.models.quantized import quantize

        model = self.model.build(device=torch.device("cpu"), gradient_checkpointing=self.gradient_checkpointing)
        quantize(sharded_root(model.module), self.base.quantize, device=device)
        model.module.to(device)
        return model

    def make_trainable(self, module: nn.Module, *, seed: int) -> None:
        """Make the weights trainable that ``train`` selects, and freeze the rest of the module."""
        self.train.make_trainable(module, targets=self.model.targets_in(module), seed=seed)
        if self.compile is not None:
            from retouch.models.kernels import compile_blocks

            compile_blocks(module)

    def require_kernels(self, device: torch.device) -> None:
        """Raise ValueError if the model's attention or its quantised layers cannot be computed on the device, or nothing can be
        compiled for it."""
        self.model.require_attention(device)
        _require_quantizers(self, device)
        if self.compile is not None:
            from retouch.models.kernels import require_compiler

            require_compiler(device)

    def for_inference(self) -> AutoregressivePolicyKeys:
        """These keys without compiled layers."""
        return self.model_copy(update={"compile": None})


def _require_quantizers(policy: DenoisingPolicyKeys | AutoregressivePolicyKeys, device: torch.device) -> None:
    for name, bits in policy.base or ():
        if bits is not None:
            from retouch.models.quantized import require_quantizer

            require_quantizer(bits, device=device, dtype=getattr(policy.model, "dtype", "float32"), key=f"policy.base.{name}")
