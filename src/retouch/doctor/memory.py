"""The memory plan of a denoising policy's run, and the size of its checkpoints, computed from the model's configuration. The
configuration is in the model's folder; if the weights are not on this machine, a packaged copy of the published one is used."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.phases import copies_in_cpu_memory, copies_needed
from retouch.assembly.value_head import saved_of_head, with_head
from retouch.doctor.device import GPUS, PlannedDevice
from retouch.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch.doctor.rows import held_out_rows, rank_rows, tasks_of
from retouch.memory.images import Sampling, sampling_plan
from retouch.memory.ip_adapter import adapter_counts, embed_width, vision_part
from retouch.memory.plan import PLAN_ERROR, LoraShape, MemoryPlan, Setup, moment_bytes, plan_parts, surely_fits
from retouch.memory.sizes import image_encoder, parts_in, stored_count
from retouch.models.base import DiffusersModel
from retouch.models.common.pretrained import find_encoder
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.language import LanguageModel, read_description
from retouch.models.shapes import INSTRUCTION_TOKENS, ImageBatch, PartConfigs, Shape
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.weights import copy_dtype
from retouch.recipe.devices import Devices
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe
from retouch.training.preflight import ROWS

_ENCODER = "image_encoder"
FREE = ", of which a tenth must stay free"
UNDECIDED = (
    f"{FREE}; the plan may be {PLAN_ERROR:.0%} too small, because it estimates activations, and --rehearse or --estimate decides "
    "whether it fits"
)
TABLE_FROM_BYTES = 10**9
"""Plans of at least this many bytes are printed row by row."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """A memory plan, the tokens of a sample, the bytes of a checkpoint, and the parameter counts of the model's parts as text."""

    plan: MemoryPlan
    tokens: int
    checkpoint: int
    counts: str


def describe(recipe: Recipe, folder: Path | None) -> PartConfigs | None:
    """Class and configuration of each part of the recipe's image model; None if they are not known before the model is loaded.

    ``folder``: the folder of the model's weights; None if they are not on this machine. Raises ValueError for a folder without such
    a model."""
    model = recipe.image_model
    if isinstance(model, LanguageModel):
        return model.describe(folder)
    if not isinstance(model, DiffusersModel):
        return None
    described = model.published() if folder is None else parts_in(folder, loaded_as=dict(model.loaded_as))
    train = recipe.policy.train
    return described if described is None or not isinstance(train, IpAdapter) else _with_encoder(described, train.encoder)


def _with_encoder(described: PartConfigs, path: str) -> PartConfigs | None:
    """Add the image encoder of an IP-Adapter as a part; None if its configuration is not known."""
    folder = find_encoder(path)
    found = image_encoder(path) if folder is None else read_description(folder)
    return None if found is None else {**described, _ENCODER: vision_part(found)}


def footprint(recipe: Recipe, described: PartConfigs) -> Footprint:
    """Plan the memory of the recipe's run. Raises ValueError if it cannot be planned, e.g. for LoRA targets without a layer."""
    assert isinstance(recipe.policy, DenoisingPolicyKeys), "writers are planned in writer_memory"
    model, train = recipe.policy.model, recipe.policy.train
    assert isinstance(model, DiffusersModel)
    dtype, trained_dtype, lora = DTYPES[model.dtype], DTYPES[train.trained_dtype(model.dtype)], train.lora
    branches, sources = _branches(recipe), _sources(recipe, model)
    joint = model.pads_prompts or dtype.itemsize > 2
    tokens = model.tokens(described, sources=sources)
    shape = model.shape(described["transformer"])
    adapter, projection = None, 0
    if isinstance(train, IpAdapter):
        adapter, projection = adapter_counts(described["transformer"], described[_ENCODER], train)
    setup = Setup(
        lora=None if lora is None else LoraShape(lora.rank, tuple(lora_targets(recipe.policy))),
        adapter=adapter,
        projection=projection,
        rows=recipe.microbatch * branches,
        passes=1 if joint else branches,
        tokens=tokens,
        dtype=dtype,
        trained_dtype=trained_dtype,
        moments=recipe.optimizer.moments,
        copies=copies_on_device(recipe, trained_dtype),
        gradient_checkpointing=recipe.policy.gradient_checkpointing,
        ranks=recipe.ranks or 1,
        sharding="zero2" if recipe.sharding == "zero2" else "fsdp" if recipe.sharding == "fsdp2" else "ddp",
        weights_on_cpu=recipe.devices is not None and recipe.devices.weights == "cpu",
        without=_in_cpu_memory(recipe.policy, recipe.devices, described),
    )
    training = with_head(plan_parts(described, setup, shape=shape), recipe, _value_head_inputs(described, shape))
    sampling = sampling_plan(model, described, _sampling(recipe, model, described, setup, joint=joint))
    planned = MemoryPlan((*training.rows, *sampling.rows), sampling.phases)

    def rows_with(**changes: Any) -> dict[str, int]:
        return {row.name: row.bytes for row in plan_parts(described, replace(setup, **changes), shape=shape).rows}

    all_here = rows_with(weights_on_cpu=False, moments=None) if setup.weights_on_cpu else rows_with()
    waiting = sum(all_here.values()) - sum(rows_with().values())
    rows = rows_with(sharding="ddp", weights_on_cpu=False)  # a checkpoint has all weights
    masters = rows.get("fp32 master weights", 0)
    count = rows["transformer, trained weights"] // trained_dtype.itemsize
    saved = count * saved_bytes(recipe, trained_dtype) + moment_bytes(count, setup.moments, saved=True) + masters
    counts = ", ".join(f"{name} {stored_count(part) / 1e9:.2f} B" for name, part in described.items())
    if waiting:
        counts += f"; {gigabytes(waiting)} of the transformer's training state in CPU memory"
    return Footprint(planned, tokens, saved + saved_of_head(planned), counts)


def _branches(recipe: Recipe) -> int:
    """2 if a phase samples with guidance, otherwise 1."""
    rollouts = [phase.rollout for phase in recipe.resolved_phases()]
    return max(2 if isinstance(each, DenoisingRollout) and each.guidance_scale > 1 else 1 for each in rollouts)


def _sources(recipe: Recipe, model: DiffusersModel) -> int:
    """The number of source images of a task; a data set that may have images is counted with one."""
    images = any(phase.data.contents().images is not False for phase in recipe.resolved_phases())
    return max(model.takes.images[0], min(1, model.takes.images[1]) * images)


def _sampling(recipe: Recipe, model: DiffusersModel, described: PartConfigs, setup: Setup, *, joint: bool) -> Sampling:
    """How the policy samples on one rank: in rollouts, in the trial step and in evaluations."""
    assert isinstance(recipe.policy, DenoisingPolicyKeys)
    phases, share, held_out = recipe.resolved_phases(), rank_rows(recipe), held_out_rows(recipe)
    sampled = [phase.rollout for phase in phases if not phase.imitates and isinstance(phase.rollout, DenoisingRollout)]
    chunk = max((min(each.chunk, share) for each in sampled), default=1)
    sources = _sources(recipe, model)
    targets = max((math.ceil(phase.rows / setup.ranks) for phase in phases if phase.imitates), default=0)
    return Sampling(
        batch=ImageBatch(
            rows=max(chunk, held_out),
            size=model.size or model.planned_size,
            source=model.source_size,
            sources=sources,
            text=model.text_tokens or INSTRUCTION_TOKENS + sources * model.condition_tokens(described),
            dtype=setup.dtype,
        ),
        branches=_branches(recipe),
        joint=joint,
        tasks=max(min(chunk, ROWS), tasks_of(recipe, chunk), held_out, targets),  # each row of a trial step may be of another task
        targets=targets,
        kept=share,
        kept_tasks=math.ceil(share / chunk) * tasks_of(recipe, chunk),
        states=max((each.longest + 2 for each in sampled), default=1),
        lora=setup.lora,
        lora_dtype=setup.trained_dtype,
        waiting=setup.without,
        cached=recipe.policy.prompt_embeddings == "cached",
    )


def copies_on_device(recipe: Recipe, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtype of each copy of trained weights of ``dtype`` that is kept where the weights are."""
    names = copies_needed(recipe)
    if recipe.sharding != "fsdp2":  # it shards all copies like the weights
        names -= copies_in_cpu_memory(recipe)
    return tuple(copy_dtype(name, dtype) for name in sorted(names))


def saved_bytes(recipe: Recipe, dtype: torch.dtype) -> int:
    """Bytes of a trained weight of ``dtype`` and its copies in a checkpoint."""
    return dtype.itemsize + sum(copy_dtype(name, dtype).itemsize for name in copies_needed(recipe))


def _in_cpu_memory(policy: DenoisingPolicyKeys, devices: Devices | None, described: PartConfigs) -> tuple[str, ...]:
    """The parts that are on the device only while they are used."""
    offload = devices is not None and devices.offload
    waits = {"text_encoder": offload or policy.prompt_embeddings == "cached", "vae": offload}
    return tuple(part for part in described if any(part.startswith(name) for name, waiting in waits.items() if waiting))


def _value_head_inputs(described: PartConfigs, shape: Shape) -> int:
    """Largest number of inputs of a value head: mean and deviation of each channel of latents, source latents and text, the pooled
    text, the embedding of an IP-Adapter's reference image, and sigma. Source latents have no more channels than the latents."""
    pooled: int = described["transformer"]["config"].get("pooled_projection_dim", 0)
    reference = embed_width(described[_ENCODER]) if _ENCODER in described else 0
    return 2 * (2 * shape.latents + shape.text) + pooled + reference + 1


def check_memory(recipe: Recipe, folder: Path | None, target: PlannedDevice | None) -> tuple[Finding, int | None]:
    """Check whether the plan fits into the memory of ``target``, and the bytes of a checkpoint.

    ``folder``: the folder of the weights; None if they are not on this machine. ``target``: None if the device is not available.
    """
    assert isinstance(recipe.policy, DenoisingPolicyKeys)
    subject = recipe.policy.model.source
    try:
        described = describe(recipe, folder)
        found = None if described is None else footprint(recipe, described)
    except ValueError as error:
        return failed("memory", f"{subject}: {error}", fix="correct policy.model and policy.train"), None
    if found is None:
        return note("memory", f"the configuration of {subject} is not known, so its memory is not planned"), None
    return _fits(recipe, subject, found, target), found.checkpoint


def _fits(recipe: Recipe, subject: str, found: Footprint, target: PlannedDevice | None) -> Finding:
    total = found.plan.total
    heading = f"parameters: {found.counts}; {found.tokens} tokens per sample"
    lines = "\n".join(["", *table(found.plan, target, heading)]) if total >= TABLE_FROM_BYTES else ""
    on_each = f" on each of {recipe.ranks} devices" if recipe.ranks is not None and recipe.ranks > 1 else ""
    if target is None:
        return note("memory", f"{subject} needs {gigabytes(total)}{on_each}{lines}")
    needed = f"{gigabytes(total)} of the {gigabytes(target.bytes)} of {target.name}{on_each}"
    if total > target.bytes:
        return failed("memory", f"{subject} does not fit: it needs {needed}{FREE}{lines}", fix=_suggested_fix(recipe))
    adding = [phase.objective.label for phase in recipe.resolved_phases() if phase.objective.differentiates_reward]
    if adding:
        adds = "its steps with gradient, the decoder's backward pass and the model of objective.reward"
        return note("memory", f"{subject} needs {needed}, plus what {adding[0]} adds, which is not planned: {adds}{lines}")
    if not surely_fits(total, target.bytes):
        return note("memory", f"{subject} may not fit: it needs {needed}{UNDECIDED}{lines}")
    return ok("memory", f"{subject} needs {needed}{lines}")


def _suggested_fix(recipe: Recipe) -> str:
    """The setting that saves the most activation memory, if one is left; otherwise a larger device."""
    if recipe.microbatch > 1:
        return "--set microbatch=1"
    if not recipe.policy.gradient_checkpointing:
        return "--set policy.gradient_checkpointing=true"
    return f"--device {next(iter(GPUS))}"


def table(plan: MemoryPlan, target: PlannedDevice | None, heading: str) -> list[str]:
    """The lines of a memory plan: permanent rows, rows of the update, phases of which one is active at a time, their total, and the
    headroom."""
    rows = [(f"{row.name} (in the update)" if row.in_update else row.name, row.bytes) for row in plan.rows]
    rows += [(f"{phase.name} (one at a time)", phase.bytes) for phase in plan.phases]
    rows.append(("total", plan.total))
    if target is not None:
        rows.append((f"headroom on {target.name}", target.bytes - plan.total))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {count / 1e9:8.2f} GB" for name, count in rows]
    return [heading, *lines]
