"""The memory plan of sampling images: by a frozen image model that only renders, and by a denoising policy. It is computed before
anything is loaded.

Weights follow from parameter counts and are exact. Activations are measured on the meta device (``peak_bytes``): one denoising step
of the transformer in its true width, and the autoencoder's encoder and decoder as a whole. One block of each kind is enough,
because without gradients the blocks use the same memory one after the other. The text encoders' activations are not counted.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.utils._pytree import tree_leaves

from retouch.memory.peak import cast_parameters, peak_bytes
from retouch.memory.plan import LoraShape, MemoryPlan, MemoryRow
from retouch.memory.sizes import build_meta, stored_count
from retouch.models.base import DiffusersModel
from retouch.models.shapes import ImageBatch, Part, PartConfigs

_META = torch.device("meta")
_STEP, _ENCODING, _DECODING = "one denoising step", "encoding of source images", "decoding of latents"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a denoising policy samples on one rank, in rollouts and in evaluations.

    ``batch``: the most images that are sampled at once. ``branches``: 2 with guidance, otherwise 1. ``joint``: one forward pass
    computes both branches. ``tasks``: tasks that are encoded at once. ``targets``: target images that are encoded at once.
    ``kept``: rows of a step, with ``states`` latents each, and ``kept_tasks``: their encoded tasks. ``lora``, ``lora_dtype``: the
    LoRA of the transformer. ``waiting``: parts that are on the device only while they are used. ``cached``: text encoders are on
    the device without the autoencoder, otherwise together with it.
    """

    batch: ImageBatch
    branches: int
    joint: bool
    tasks: int
    targets: int
    kept: int
    kept_tasks: int
    states: int
    lora: LoraShape | None
    lora_dtype: torch.dtype
    waiting: Sequence[str] = ()
    cached: bool = False


def image_model_plan(
    model: DiffusersModel, described: PartConfigs, batch: ImageBatch, *, without: tuple[str, ...] = ()
) -> MemoryPlan:
    """The memory plan of the renderer's device. ``without``: names of parts that are on another device."""
    rows = [
        MemoryRow(part if part != "transformer" else "image model", stored_count(made) * batch.dtype.itemsize)
        for part, made in described.items()
        if part not in without
    ]
    inputs, noisy = _step_inputs(model, described, batch)
    # Between steps, latents and the velocities of both branches of guidance are kept in fp32.
    step = _step_bytes(model, described, batch, lora=None, lora_dtype=batch.dtype) + inputs + 3 * 4 * noisy
    phases = [MemoryRow(f"rendering: {_STEP}", step)]
    if batch.sources:
        phases.append(MemoryRow(f"rendering: {_ENCODING}", _encoding_bytes(model, described["vae"], batch)))
    phases.append(MemoryRow(f"rendering: {_DECODING}", _decoding_bytes(model, described["vae"], batch)))
    return MemoryPlan(tuple(rows), tuple(phases))


def sampling_plan(model: DiffusersModel, described: PartConfigs, sampling: Sampling) -> MemoryPlan:
    """What sampling adds to the plan of a denoising policy: a permanent row with the samples of a step, and the phases of sampling.

    Parts in ``sampling.waiting`` are added to the phases that use them.
    """
    batch, vae = sampling.batch, described["vae"]
    weights = {part: stored_count(described[part]) * batch.dtype.itemsize for part in sampling.waiting}
    autoencoder = weights.get("vae", 0)
    together = batch.rows * (sampling.branches if sampling.joint else 1)
    one_row = model.latents(vae, replace(batch, rows=1)).numel() * torch.float32.itemsize
    inputs, _ = _step_inputs(model, described, replace(batch, rows=1))
    conditioning = inputs * sampling.branches
    step = _step_bytes(model, described, replace(batch, rows=together), lora=sampling.lora, lora_dtype=sampling.lora_dtype)
    # A chunk has its conditioning per task and per row, and the rows of one forward pass are copies of these.
    step += conditioning * 2 * batch.rows + inputs * together + 3 * one_row * batch.rows
    kept = sampling.kept * sampling.states * one_row + sampling.kept_tasks * conditioning
    phases = [MemoryRow(f"sampling: {_STEP}", step)]
    if sum(weights.values()) > autoencoder:
        phases.append(MemoryRow("sampling: weights of text encoders and autoencoder", sum(weights.values())))
    if batch.sources:
        size = _encoding_bytes(model, vae, replace(batch, rows=sampling.tasks))
        phases.append(MemoryRow(f"sampling: {_ENCODING}", size + (autoencoder if sampling.cached else sum(weights.values()))))
    phases.append(MemoryRow(f"sampling: {_DECODING}", _decoding_bytes(model, vae, batch) + autoencoder))
    if sampling.targets:
        at_once = replace(batch, rows=sampling.targets, source=batch.size)
        phases.append(MemoryRow("encoding of target images", _encoding_bytes(model, vae, at_once) + autoencoder))
    return MemoryPlan((MemoryRow("samples of a step", kept),), tuple(phases))


def codes_plan(autoencoder: Part, *, decoded: int, encoded: int, size: tuple[int, int]) -> MemoryPlan:
    """The memory plan of an image tokenizer that decodes ``decoded`` images and encodes ``encoded`` images at once, in fp32.

    ``size``: (height, width) in pixels.
    """
    module: Any = build_meta(autoencoder)
    height, width = (edge // module.spatial_scale_factor for edge in size)
    codes = torch.empty(decoded, height, width, dtype=torch.long, device=_META)
    pixels = torch.empty(encoded, autoencoder["config"]["in_channels"], *size, device=_META)
    sizes = torch.tensor([size] * encoded)
    existing = [codes, pixels, *module.parameters(), *module.buffers()]
    with torch.no_grad():
        return MemoryPlan(
            (MemoryRow("autoencoder", stored_count(autoencoder) * torch.float32.itemsize),),
            (
                MemoryRow("rendering: decoding of codes", peak_bytes(lambda: module.decode(codes), existing=existing)),
                MemoryRow("encoding: images to codes", peak_bytes(lambda: module.encode(pixels, sizes), existing=existing)),
            ),
        )


def _step_inputs(model: DiffusersModel, described: PartConfigs, batch: ImageBatch) -> tuple[int, int]:
    """Bytes of the inputs of a denoising step, and the number of values of its latents."""
    inputs = model.step_inputs(described, batch)
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    noisy = sum(value.numel() for value in tree_leaves(next(iter(inputs.values()))))
    return sum(value.numel() * value.element_size() for value in tensors), noisy


def _step_bytes(
    model: DiffusersModel, described: PartConfigs, batch: ImageBatch, *, lora: LoraShape | None, lora_dtype: torch.dtype
) -> int:
    """Bytes that a denoising step creates, besides its inputs."""
    parts = json.dumps(described)
    return _of_rows(lambda each: _step_peak(model, parts, each, lora, lora_dtype), batch)


def _of_rows(measure: Callable[[ImageBatch], int], batch: ImageBatch) -> int:
    """Measure the bytes for the batch. They grow linearly with the rows, so only batches of one and of two rows are measured."""
    one = measure(replace(batch, rows=1))
    return one if batch.rows == 1 else one + (batch.rows - 1) * (measure(replace(batch, rows=2)) - one)


@cache
def _step_peak(model: DiffusersModel, described: str, batch: ImageBatch, lora: LoraShape | None, lora_dtype: torch.dtype) -> int:
    """``described``: the model's parts as JSON."""
    parts = json.loads(described)
    module = cast_parameters(copy.deepcopy(build_meta(model.one_of_each_block(parts["transformer"]))), batch.dtype)
    if lora is not None:
        inject_adapter_in_model(LoraConfig(r=lora.rank, target_modules=list(lora.targets)), module)
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(lora_dtype)
    inputs = model.step_inputs(parts, batch)
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    with torch.no_grad():
        return peak_bytes(lambda: module(**inputs), existing=[*tensors, *module.parameters(), *module.buffers()])


def _decoding_bytes(model: DiffusersModel, vae: Part, batch: ImageBatch) -> int:
    part = json.dumps(vae)
    return _of_rows(lambda each: _autoencoder_peak(model, part, each, "decode"), replace(batch, sources=0, text=0))


def _encoding_bytes(model: DiffusersModel, vae: Part, batch: ImageBatch) -> int:
    part = json.dumps(vae)
    return _of_rows(lambda each: _autoencoder_peak(model, part, each, "encode"), replace(batch, sources=0, text=0))


@cache
def _autoencoder_peak(model: DiffusersModel, vae: str, batch: ImageBatch, method: str) -> int:
    """Bytes that the autoencoder creates when it decodes or encodes the batch's images. ``vae``: its description as JSON."""
    part = json.loads(vae)
    module: Any = cast_parameters(copy.deepcopy(build_meta(part)), batch.dtype)
    model.prepare_vae(module)
    model.limit_vae(module)
    given = model.latents(part, batch) if method == "decode" else model.pixels(part, batch)
    with torch.no_grad():
        return peak_bytes(lambda: getattr(module, method)(given), existing=[given, *module.parameters(), *module.buffers()])
