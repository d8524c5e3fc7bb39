"""The memory plan of a language-model policy, computed before anything is loaded.

Weights, gradients, optimizer states and KV caches follow from counts and are exact. Activations are measured on the meta device
(``peak_bytes``): one layer of the language model in its true width, times the number of layers. The CUDA context, workspaces,
fragmentation and NCCL's buffers are not counted: leave a tenth of the memory free.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from retouch.core.tokens import log_prob, sample_tokens, warp_logits
from retouch.memory.peak import FusedAttention, PeakMemory, cast_parameters, peak_bytes
from retouch.memory.plan import LoraShape, MemoryPlan, MemoryRow, Moments, moment_bytes
from retouch.memory.sizes import build_meta, lora_count, parameter_count, stored_count
from retouch.models.common.sharded import whole_weights
from retouch.models.shapes import Part

Sharding: TypeAlias = Literal["replicated", "zero2", "fsdp2"]
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSetup:
    """How a language model is used and trained on one rank.

    ``prompt``, ``completion``: tokens per row, at most. ``update``, ``trial``: (tasks, completions) per forward pass with gradient,
    in a training step and in the trial step, whose rows are of as many tasks as possible; ``rollout``: (tasks, completions) that
    are generated at once; ``evaluation``: held-out tasks at once. ``logits_at_once``: positions whose logits exist at the same
    time. ``lora``: None trains all weights. ``dtype``: type of frozen weights and
    activations; ``trained_dtype``: of trained weights and their gradients. ``moments``: see ``moment_bytes``. ``copies``: the dtype
    of each further copy of the trained weights on the device. ``offload_reference``: the reference is in CPU memory while it is
    not used. ``grammar_sets``: number of token sets of the grammar. ``sharding``: what is sharded over ``ranks``.
    ``weights_on_cpu``: the weights that "fsdp2" shards are in CPU memory while they are not used, with their gradients, moments and
    copies."""

    lora: LoraShape | None
    prompt: int
    completion: int
    update: tuple[int, int]
    trial: tuple[int, int] = (1, 1)
    rollout: tuple[int, int]
    evaluation: int
    logits_at_once: int
    dtype: torch.dtype
    trained_dtype: torch.dtype
    copies: Sequence[torch.dtype]
    gradient_checkpointing: bool
    offload_reference: bool = False
    moments: Moments = None
    attention: str = "sdpa"
    grammar_sets: int = 1
    ranks: int = 1
    sharding: Sharding = "replicated"
    weights_on_cpu: bool = False


def writer_plan(writer: Part, setup: WriterSetup) -> MemoryPlan:
    """The plan of the policy's device. Raises ValueError for a LoRA target without a layer, and for a model of an unknown class."""
    frozen = stored_count(writer)
    if setup.lora is None:
        trained = parameter_count(writer)
        frozen -= trained
    else:
        trained = lora_count(writer, rank=setup.lora.rank, targets=setup.lora.targets)
    whole = sum(weight.numel() for weight in whole_weights(build_meta(writer)))
    rows = _permanent(setup, frozen, trained, whole=whole if setup.sharding == "fsdp2" else 0)
    return MemoryPlan(tuple(row for row in rows if row.bytes), _phases(writer, setup, trained))


def _permanent(setup: WriterSetup, frozen: int, trained: int, *, whole: int) -> list[MemoryRow]:
    """The permanent rows of the plan. ``whole``: number of the model's own weights that FSDP2 does not shard; they are trained if
    all weights are trained."""
    ranks, here = setup.ranks if setup.sharding == "fsdp2" else 1, 0 if setup.weights_on_cpu else 1
    size = setup.trained_dtype.itemsize
    whole_frozen, whole_trained = (0, whole) if setup.lora is None else (whole, 0)

    def of_trained(each: int) -> int:
        """Bytes on the device if every trained weight needs ``each`` bytes."""
        return here * math.ceil((trained - whole_trained) * each / ranks) + whole_trained * each

    frozen_shared = here * math.ceil((frozen - whole_frozen) * setup.dtype.itemsize / ranks)
    if setup.sharding == "zero2":
        moments = math.ceil(moment_bytes(trained, setup.moments) / setup.ranks)
    else:
        moments = of_trained(8) if setup.moments is None else moment_bytes(trained, setup.moments)
    rows = [
        MemoryRow("writer, frozen weights", frozen_shared + whole_frozen * setup.dtype.itemsize),
        MemoryRow("writer, trained weights", of_trained(size)),
        # DeepSpeed has gradients only during a backward pass.
        MemoryRow("gradients", 0 if setup.sharding == "zero2" else of_trained(size)),
        MemoryRow("AdamW's two moments", moments),
        MemoryRow("copies of the trained weights", of_trained(sum(dtype.itemsize for dtype in setup.copies))),
    ]
    if setup.sharding == "zero2":
        rows.append(MemoryRow("ZeRO's shares of gradients and weights", math.ceil(trained * (size + 4) / setup.ranks)))
    elif size < 4:
        rows.append(MemoryRow("fp32 master weights and gradients", of_trained(8)))
    return rows


def _phases(writer: Part, setup: WriterSetup, trained: int) -> tuple[MemoryRow, ...]:
    """The memory of each phase beyond the permanent rows. Only one phase is active at a time."""
    config = _text_config(writer)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    shared = not setup.gradient_checkpointing
    tokens, trial = (_tokens(setup, *passed) for passed in (setup.update, setup.trial))
    tokens = max(tokens, trial)
    kept, peak = _layer(writer, setup, tokens)
    states = tokens * width * setup.dtype.itemsize
    update = layers * kept + peak - kept if shared else layers * states + peak
    gathered = 2 * _layer_bytes(writer) * setup.dtype.itemsize if setup.sharding == "fsdp2" else 0
    vocabulary = config["vocab_size"]
    logits = peak_bytes(lambda: _update_logits(setup.logits_at_once, vocabulary, width, setup))
    update += logits
    if setup.sharding == "zero2":
        update += trained * setup.trained_dtype.itemsize  # DeepSpeed's bucket for all gradients
    reference = trained * setup.trained_dtype.itemsize + prefill_bytes(writer, tokens, setup.dtype) + logits
    return (
        MemoryRow("update: activations and logits", update + gathered),
        MemoryRow("rollout: cache and logits", _generation_bytes(writer, setup, *setup.rollout) + gathered),
        MemoryRow("evaluation: cache and logits", _generation_bytes(writer, setup, setup.evaluation, setup.evaluation) + gathered),
        *([MemoryRow("reference model: weights, states and logits", reference)] if setup.offload_reference else []),
    )


def _tokens(setup: WriterSetup, tasks: int, rows: int) -> int:
    """Tokens of a forward pass with gradient. Without gradient checkpointing, the rows of a task share its prompt."""
    prompts = rows if setup.gradient_checkpointing else tasks
    return prompts * setup.prompt + rows * setup.completion


def _generation_bytes(writer: Part, setup: WriterSetup, tasks: int, rows: int) -> int:
    """Bytes of the KV cache of ``tasks`` prompts and ``rows`` completions, and of the activations of generation."""
    config = _text_config(writer)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    each = 2 * config["num_hidden_layers"] * heads * head * setup.dtype.itemsize
    cache = each * (tasks * setup.prompt + rows * (setup.prompt + setup.completion))
    prefill = prefill_bytes(writer, tasks * setup.prompt, setup.dtype)
    return cache + max(prefill, peak_bytes(lambda: _sample(rows, config["vocab_size"], setup.grammar_sets)))


def prefill_bytes(writer: Part, tokens: int, dtype: torch.dtype) -> int:
    """Peak bytes of activations while the language model computes this many tokens without gradient."""
    layer, states, angles = _one_layer(writer, tokens, dtype, attention="sdpa")
    with torch.no_grad():
        peak = peak_bytes(
            lambda: layer(states, attention_mask=None, position_embeddings=angles),
            existing=[states, *angles, *layer.parameters()],
        )
    return peak + states.numel() * dtype.itemsize


# One layer of a language model


def _layer(writer: Part, setup: WriterSetup, tokens: int) -> tuple[int, int]:
    """Bytes that one layer keeps for its backward pass, and its peak over forward and backward pass."""
    layer, states, angles = _one_layer(writer, tokens, setup.dtype, attention=setup.attention)
    if setup.lora is not None:
        layer.requires_grad_(False)
        names = {name.rpartition(".")[2] for name, inner in layer.named_modules() if isinstance(inner, nn.Linear)}
        found = [target for target in setup.lora.targets if target.rpartition(".")[2] in names]
        if found:
            inject_adapter_in_model(LoraConfig(r=setup.lora.rank, target_modules=found), layer)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if parameter.requires_grad:
                parameter.data = parameter.data.to(setup.trained_dtype)
    states.requires_grad_()
    trained = sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)
    with PeakMemory([states, *angles, *layer.parameters()]) as memory, FusedAttention():
        output = layer(states, attention_mask=None, position_embeddings=angles)
        output = output if isinstance(output, Tensor) else output[0]
        kept = memory.current
        output.sum().backward()
    return kept, memory.peak - trained  # the plan has a separate row for the gradients of weights


def _one_layer(writer: Part, tokens: int, dtype: torch.dtype, *, attention: str) -> tuple[nn.Module, Tensor, tuple[Tensor, Tensor]]:
    """A layer, its input states and rotary angles, all on the meta device."""
    model: Any = build_meta(_shallow(writer))
    decoder = model.model.language_model if hasattr(model.model, "language_model") else model.model
    layer: Any = cast_parameters(copy.deepcopy(decoder.layers[0]), dtype)
    layer.self_attn.config._attn_implementation = "eager" if attention == "eager" else "sdpa"
    config = _text_config(writer)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    angles = torch.empty(1, tokens, head, dtype=dtype, device=_META)
    states = torch.empty(1, tokens, config["hidden_size"], dtype=dtype, device=_META)
    return layer, states, (angles, angles.clone())


def _layer_bytes(writer: Part) -> int:
    model: Any = build_meta(_shallow(writer))
    decoder = model.model.language_model if hasattr(model.model, "language_model") else model.model
    return sum(weight.numel() for weight in decoder.layers[0].parameters())


def _shallow(writer: Part) -> dict[str, Any]:
    """The description of the language model with a single layer."""
    config = copy.deepcopy(dict(writer["config"]))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 1
    text.pop("layer_types", None)
    return {"class": writer["class"], "config": config}


def _text_config(writer: Part) -> dict[str, Any]:
    config = writer["config"]
    return dict(config.get("text_config") or config)


def _update_logits(count: int, vocabulary: int, width: int, setup: WriterSetup) -> None:
    states = torch.empty(count, width, dtype=setup.dtype, device=_META, requires_grad=True)
    head = torch.empty(vocabulary, width, dtype=setup.dtype, device=_META)
    allowed = _allowed(count, vocabulary, setup.grammar_sets)
    logits = warp_logits((states @ head.T).float(), allowed, temperature=1.0)
    log_prob(logits, torch.empty(count, dtype=torch.long, device=_META)).sum().backward()


def _sample(rows: int, vocabulary: int, sets: int) -> None:
    logits = torch.empty(rows, vocabulary, dtype=torch.float32, device=_META)
    sample_tokens(
        warp_logits(logits, _allowed(rows, vocabulary, sets), temperature=1.0), torch.empty(rows, dtype=torch.float64, device=_META)
    )


def _allowed(positions: int, vocabulary: int, sets: int) -> Tensor:
    """The mask of allowed tokens: one row for all positions if the grammar has a single set."""
    return torch.empty(1 if sets == 1 else positions, vocabulary, dtype=torch.bool, device=_META)
