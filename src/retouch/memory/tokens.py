"""What a policy that writes keeps on its device, worked out before anything is loaded.

Weights, gradients, optimizer states and caches follow from counts and are exact. What comes and goes is measured on the meta device
(``live_bytes``): one layer of the language model in its true width, times how many there are. The CUDA context, workspaces,
fragmentation and NCCL's buffers are not counted: leave a tenth free.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from retouch.core.tokens import log_prob, sample_tokens, warp_logits
from retouch.memory.peak import FusedAttention, Live, in_dtype, most_alive
from retouch.memory.plan import LoraShape, MemoryPlan, MemoryRow
from retouch.memory.sizes import build_meta, lora_count, parameter_count, stored_count
from retouch.models.base import Part

Sharding: TypeAlias = Literal["replicated", "zero2", "fsdp2"]
_ADAMW_BYTES = 8  # two fp32 moments
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a language model is trained on one rank.

    ``prompt`` and ``completion``: tokens of a row, at most. ``update``: (tasks, completions) in one forward with gradient;
    ``rollout``: the same of what is written at once; ``evaluation``: held-out tasks at once. ``logits_at_once``: tokens whose
    logits exist at once. ``lora`` None trains all weights; ``trained_dtype`` and ``copies`` are of what trains. ``waiting``: the
    reference is one of these and waits in the CPU's memory while it is not asked. ``sharding``: what ``ranks`` share. ``sets``: of
    the grammar.
    """

    lora: LoraShape | None
    prompt: int
    completion: int
    update: tuple[int, int]
    rollout: tuple[int, int]
    evaluation: int
    logits_at_once: int
    dtype: torch.dtype
    trained_dtype: torch.dtype
    copies: int
    gradient_checkpointing: bool
    waiting: bool = False
    attention: str = "sdpa"
    sets: int = 1
    ranks: int = 1
    sharding: Sharding = "replicated"


def writer_plan(writer: Part, setup: Writing) -> MemoryPlan:
    """What the policy's device holds. ValueError for LoRA targets that match nothing, and for a class that cannot be counted."""
    frozen = stored_count(writer)
    if setup.lora is None:
        trained = parameter_count(writer)
        frozen -= trained
    else:
        trained = lora_count(writer, rank=setup.lora.rank, targets=setup.lora.targets)
    return MemoryPlan(tuple(row for row in _kept(setup, frozen, trained) if row.bytes), _phases(writer, setup, trained))


def _kept(setup: Writing, frozen: int, trained: int) -> list[MemoryRow]:
    sharded = 1 if setup.sharding == "replicated" else setup.ranks
    whole = setup.ranks if setup.sharding == "fsdp2" else 1
    size, beside = setup.trained_dtype.itemsize, setup.copies - setup.waiting
    rows = [
        MemoryRow("writer, frozen weights", math.ceil(frozen * setup.dtype.itemsize / whole)),
        MemoryRow("writer, trained weights", math.ceil(trained * size / whole)),
        MemoryRow("gradients", math.ceil(trained * size / whole)),
        MemoryRow("AdamW's two moments", math.ceil(trained * _ADAMW_BYTES / sharded)),
        MemoryRow("copies of the trained weights", math.ceil(beside * trained * size / whole)),
    ]
    if setup.sharding == "zero2":
        # A bucket as large as all gradients, and this rank's shares of them and of the weights in fp32.
        rows.append(MemoryRow("ZeRO's shares of gradients and weights", math.ceil(trained * (size + 4) / setup.ranks)))
    return rows


def _phases(writer: Part, setup: Writing, trained: int) -> tuple[MemoryRow, ...]:
    """What comes and goes, one after the other."""
    config = _text_config(writer)
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    tasks, rows = setup.update
    shared = not setup.gradient_checkpointing
    tokens = tasks * setup.prompt + rows * setup.completion if shared else rows * (setup.prompt + setup.completion)
    kept, most = _layer(writer, setup, tokens)
    states = tokens * width * setup.dtype.itemsize
    update = layers * kept + most - kept if shared else layers * states + most
    gathered = 2 * _layer_bytes(writer) * setup.dtype.itemsize if setup.sharding == "fsdp2" else 0
    vocabulary = config["vocab_size"]
    logits = most_alive(lambda: _update_logits(setup.logits_at_once, vocabulary, width, setup))
    update += logits
    reference = trained * setup.trained_dtype.itemsize + reading_bytes(writer, tokens, setup.dtype) + logits
    return (
        MemoryRow("an update: activations and logits", update + gathered),
        MemoryRow("a rollout: cache and logits", _writing_bytes(writer, setup, *setup.rollout) + gathered),
        MemoryRow("an evaluation: cache and logits", _writing_bytes(writer, setup, setup.evaluation, setup.evaluation) + gathered),
        *([MemoryRow("the reference, which comes over: its weights, states and logits", reference)] if setup.waiting else []),
    )


def _writing_bytes(writer: Part, setup: Writing, tasks: int, rows: int) -> int:
    """The cache of ``rows`` completions of ``tasks`` prompts, and what comes and goes beside it."""
    config = _text_config(writer)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    each = 2 * config["num_hidden_layers"] * heads * head * setup.dtype.itemsize
    cache = each * (tasks * setup.prompt + rows * (setup.prompt + setup.completion))
    reading = reading_bytes(writer, tasks * setup.prompt, setup.dtype)
    return cache + max(reading, most_alive(lambda: _draw(rows, config["vocab_size"], setup.sets)))


def reading_bytes(writer: Part, tokens: int, dtype: torch.dtype) -> int:
    """What comes and goes while the language model reads so many tokens without gradient."""
    layer, states, angles = _one_layer(writer, tokens, dtype, attention="sdpa")
    with torch.no_grad():
        made = most_alive(
            lambda: layer(states, attention_mask=None, position_embeddings=angles),
            given=[states, *angles, *layer.parameters()],
        )
    return made + states.numel() * dtype.itemsize


# One layer of a language model


def _layer(writer: Part, setup: Writing, tokens: int) -> tuple[int, int]:
    """Bytes that one layer keeps for its backward pass, and the most that is alive in its forward and backward pass."""
    layer, states, angles = _one_layer(writer, tokens, setup.dtype, attention=setup.attention)
    if setup.lora is not None:
        layer.requires_grad_(False)
        names = {name.rpartition(".")[2] for name, inner in layer.named_modules() if isinstance(inner, nn.Linear)}
        hit = [target for target in setup.lora.targets if target.rpartition(".")[2] in names]
        if hit:
            inject_adapter_in_model(LoraConfig(r=setup.lora.rank, target_modules=hit), layer)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if parameter.requires_grad:
                parameter.data = parameter.data.to(setup.trained_dtype)
    states.requires_grad_()
    trained = sum(p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad)
    with Live([states, *angles, *layer.parameters()]) as live, FusedAttention():
        made = layer(states, attention_mask=None, position_embeddings=angles)
        made = made if isinstance(made, Tensor) else made[0]
        kept = live.now
        made.sum().backward()
    return kept, live.most - trained  # gradients of weights have a row of their own


def _one_layer(writer: Part, tokens: int, dtype: torch.dtype, *, attention: str) -> tuple[nn.Module, Tensor, tuple[Tensor, Tensor]]:
    """A layer, states before it and rotary angles, all on the meta device."""
    model: Any = build_meta(_shallow(writer))
    decoder = model.model.language_model if hasattr(model.model, "language_model") else model.model
    layer = in_dtype(copy.deepcopy(decoder.layers[0]), dtype)
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
    """The same language model with one layer."""
    config = copy.deepcopy(dict(writer["config"]))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 1
    text.pop("layer_types", None)
    return {"class": writer["class"], "config": config}


def _text_config(writer: Part) -> dict[str, Any]:
    config = writer["config"]
    return dict(config.get("text_config") or config)


def _update_logits(count: int, vocabulary: int, width: int, setup: Writing) -> None:
    states = torch.empty(count, width, dtype=setup.dtype, device=_META, requires_grad=True)
    head = torch.empty(vocabulary, width, dtype=setup.dtype, device=_META)
    allowed = _allowed(count, vocabulary, setup.sets)
    logits = warp_logits((states @ head.T).float(), allowed, temperature=1.0)
    log_prob(logits, torch.empty(count, dtype=torch.long, device=_META)).sum().backward()


def _draw(rows: int, vocabulary: int, sets: int) -> None:
    logits = torch.empty(rows, vocabulary, dtype=torch.float32, device=_META)
    sample_tokens(
        warp_logits(logits, _allowed(rows, vocabulary, sets), temperature=1.0), torch.empty(rows, dtype=torch.float64, device=_META)
    )


def _allowed(places: int, vocabulary: int, sets: int) -> Tensor:
    """What may be drawn: one row for all places where the grammar has one set."""
    return torch.empty(1 if sets == 1 else places, vocabulary, dtype=torch.bool, device=_META)
