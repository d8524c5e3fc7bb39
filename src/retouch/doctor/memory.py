"""What a recipe's run keeps on each device and in each checkpoint, planned from the model's configuration: its folder's, or for
weights that are not here the published one."""

from dataclasses import dataclass
from pathlib import Path

import torch

from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.phases import copies_needed
from retouch.assembly.value_head import saved_of_head, with_head
from retouch.doctor.device import CARDS, Place
from retouch.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch.memory import plan as memory
from retouch.memory.ip_adapter import adapter_counts, embed_width, vision_part
from retouch.memory.plan import MemoryPlan, Setup, plan_parts
from retouch.memory.sizes import image_encoder, parts_in, stored_count
from retouch.models.base import Described, DiffusersModel, Shape
from retouch.models.common.pretrained import find_encoder
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.language import LanguageModel, read_description
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe

_ENCODER = "image_encoder"
LEFT_FREE = 0.1
SHOWN_FROM = 10**9


@dataclass(frozen=True, slots=True)
class Footprint:
    """``checkpoint``: bytes of one. ``counts``: a line about how large the model's parts are."""

    plan: MemoryPlan
    tokens: int
    checkpoint: int
    counts: str


def describe(recipe: Recipe, folder: Path | None) -> Described | None:
    """The recipe's model part by part; None where its size is not known before it is loaded.

    ``folder``: where its weights lie; None, not on this machine. ValueError for a folder that holds no such model.
    """
    model = recipe.image_model
    if isinstance(model, LanguageModel):
        return model.describe(folder)
    if not isinstance(model, DiffusersModel):
        return None
    described = model.published() if folder is None else parts_in(folder, loaded_as=dict(model.loaded_as))
    train = recipe.policy.train
    return described if described is None or not isinstance(train, IpAdapter) else _with_encoder(described, train.encoder)


def _with_encoder(described: Described, path: str) -> Described | None:
    """The image encoder of an IP-Adapter as one more part; None where its size is not known."""
    folder = find_encoder(path)
    found = image_encoder(path) if folder is None else read_description(folder)
    return None if found is None else {**described, _ENCODER: vision_part(found)}


def footprint(recipe: Recipe, described: Described) -> Footprint:
    """What the recipe's run keeps. ValueError where it cannot be planned (LoRA targets that match nothing, say)."""
    assert isinstance(recipe.policy, DenoisingPolicyKeys), "a writer's memory is not planned"
    model, train = recipe.policy.model, recipe.policy.train
    assert isinstance(model, DiffusersModel)
    copies, dtype, lora = len(copies_needed(recipe)), DTYPES[model.dtype], train.lora
    # Both branches of guidance go through one forward.
    rollouts = [phase.rollout for phase in recipe.resolved_phases()]
    branches = max(2 if isinstance(each, DenoisingRollout) and each.guidance_scale > 1 else 1 for each in rollouts)
    images = any(phase.data.contents().images is not False for phase in recipe.resolved_phases())
    tokens = model.tokens(described, sources=max(model.takes.images[0], min(1, model.takes.images[1]) * images))
    shape = model.shape(described["transformer"])
    adapter, projection = None, 0
    if isinstance(train, IpAdapter):
        adapter, projection = adapter_counts(described["transformer"], described[_ENCODER], train)
    setup = Setup(
        lora=None if lora is None else memory.LoraShape(lora.rank, tuple(lora_targets(recipe.policy))),
        adapter=adapter,
        projection=projection,
        rows=recipe.microbatch * branches,
        tokens=tokens,
        dtype=dtype,
        trained_dtype=dtype if train.keeps_dtype else torch.float32,
        copies=copies,
        gradient_checkpointing=recipe.policy.gradient_checkpointing,
        ranks=recipe.ranks or 1,
        sharding="zero2" if recipe.sharding == "zero2" else "fsdp" if recipe.sharding == "fsdp2" else "ddp",
    )
    planned = with_head(plan_parts(described, setup, shape=shape), recipe, _seen_by_head(described, shape))
    rows = {row.name: row.bytes for row in planned.rows}
    checkpoint = (1 + copies) * rows["transformer, trained weights"] + rows["AdamW's two moments"] + saved_of_head(planned)
    counts = ", ".join(f"{name} {stored_count(part) / 1e9:.2f} B" for name, part in described.items())
    return Footprint(planned, tokens, checkpoint, counts)


def _seen_by_head(described: Described, shape: Shape) -> int:
    """Numbers that a value head reads: of latents and sources, which are no wider than the transformer's input, of the text, and of
    the reference that an IP-Adapter is shown."""
    pooled: int = described["transformer"]["config"].get("pooled_projection_dim", 0)
    shown = embed_width(described[_ENCODER]) if _ENCODER in described else 0
    return 2 * (2 * shape.latents + shape.text) + pooled + shown + 1


def check_memory(recipe: Recipe, folder: Path | None, place: Place | None) -> tuple[Finding, int | None]:
    """Whether the plan fits on the place, with the plan line by line where it is of any size; and the bytes of a checkpoint.

    ``folder``: where the weights lie; None, not on this machine.
    """
    assert isinstance(recipe.policy, DenoisingPolicyKeys)
    subject = recipe.policy.model.source
    try:
        described = describe(recipe, folder)
        found = None if described is None else footprint(recipe, described)
    except ValueError as error:
        return failed("memory", f"{subject}: {error}", mend="mend what policy.model and policy.train name"), None
    if found is None:
        return note("memory", f"no configuration of {subject} is known here, so its memory is not planned"), None
    return _fits(recipe, subject, found, place), found.checkpoint


def _fits(recipe: Recipe, subject: str, found: Footprint, place: Place | None) -> Finding:
    total = found.plan.total
    heading = f"parameters: {found.counts}; {found.tokens} tokens a row"
    lines = "\n".join(["", *table(found.plan, place, heading)]) if total >= SHOWN_FROM else ""
    on_each = f" on each of {recipe.ranks} devices" if recipe.ranks is not None and recipe.ranks > 1 else ""
    if place is None:
        return note("memory", f"{subject} needs {gigabytes(total)}{on_each}{lines}")
    needed = f"{gigabytes(total)} of the {gigabytes(place.bytes)} of {place.name}{on_each}"
    if total > place.bytes:
        return failed("memory", f"{subject} does not fit: it needs {needed}{lines}", mend=_mend(recipe))
    if total > (1 - LEFT_FREE) * place.bytes:
        return note("memory", f"{subject} fits narrowly: it needs {needed}, and a tenth should be free{lines}")
    return ok("memory", f"{subject} needs {needed}{lines}")


def _mend(recipe: Recipe) -> str:
    """What saves most activations, as long as there is something to save; then a larger device."""
    if recipe.microbatch > 1:
        return "--set microbatch=1"
    if not recipe.policy.gradient_checkpointing:
        return "--set policy.gradient_checkpointing=true"
    return f"--device {next(iter(CARDS))}"


def table(plan: MemoryPlan, place: Place | None, heading: str) -> list[str]:
    """The plan's rows, what takes turns, the most that they come to together, and what is left over."""
    rows = [(row.name, row.bytes) for row in plan.rows]
    rows += [(f"{phase.name} (in turn)", phase.bytes) for phase in plan.phases]
    rows.append(("total", plan.total))
    if place is not None:
        rows.append((f"headroom on {place.name}", place.bytes - plan.total))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {count / 1e9:8.2f} GB" for name, count in rows]
    return [heading, *lines]
