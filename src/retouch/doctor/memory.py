"""What a recipe's run keeps on each device and in each checkpoint, planned from the model's configuration: its folder's, or for
weights that are not here the published one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from retouch.assembly.emu3 import describe_emu3
from retouch.assembly.ip_adapter import form_of
from retouch.assembly.learning import copies_needed
from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.value_head import saved_of_head, with_head
from retouch.doctor.device import CARDS, Place
from retouch.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch.memory import plan as memory
from retouch.memory.ip_adapter import adapter_counts, embed_width, vision_part
from retouch.memory.plan import MemoryPlan, Setup, plan_parts
from retouch.memory.shapes import shape_of
from retouch.memory.sizes import image_encoder, model_in, parts, parts_in, stored_count
from retouch.models.common.pretrained import find_encoder
from retouch.models.qwen_image.edit import QwenImageEdit, QwenImageEditPlus
from retouch.playground.world.scenes import SIZE
from retouch.playground.world.words import HEIGHT, WIDTH
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.ip_adapter import IpAdapter, lora_of
from retouch.recipe.policy import DenoisingPolicy, DiffusersModel, ImportedModel, PlaygroundModel, PlaygroundWords
from retouch.recipe.recipe import Recipe
from retouch.recipe.rollout import DenoisingRollout
from retouch.recipe.train import FullWeights

Described = Mapping[str, Mapping[str, Any]]

EDITORS = {"qwen-image-edit": QwenImageEdit, "qwen-image-edit-plus": QwenImageEditPlus}
INSTRUCTION_TOKENS = 256
# What the text becomes at most; in all but Z-Image, whose prompts are not padded, at least too.
TEXT_TOKENS = {"sd3": 77 + 256, "z-image": 512, "flux": 512, "flux-fill": 512, "flux-kontext": 512, "playground-words": 14}
_MEGAPIXEL = (1024, 1024)
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
    if isinstance(model, ImportedModel):
        return None
    if isinstance(model, TokenModel):
        return describe_emu3(model, folder)
    if folder is not None:
        described: Described = parts_in(folder)
    else:
        assert isinstance(model, DiffusersModel), "the playground's model has a folder"
        published = _published(model)
        if published is None:
            return None
        described = parts(published)
    train = recipe.policy.train
    return _with_encoder(described, train.encoder) if isinstance(train, IpAdapter) else described


def _with_encoder(described: Described, path: str) -> Described | None:
    """The image encoder of an IP-Adapter as one more part; None where its size is not known."""
    folder = find_encoder(path)
    found = image_encoder(path) if folder is None else model_in(folder)
    return None if found is None else {**described, _ENCODER: vision_part(found)}


def _published(model: DiffusersModel) -> str | None:
    """The configuration of the published model. All of Qwen's image models have one size, and both of Z-Image; SD3's are told apart
    by their names, and of FLUX.1 the distilled one (schnell) has a little less."""
    name = Path(model.path).name.lower()
    match model.kind:
        case "z-image":
            return "z-image"
        case "flux-fill":
            return "flux.1-fill-dev"
        case "flux" | "flux-kontext":
            return "flux.1-schnell" if "schnell" in name else "flux.1-dev"
        case "qwen-image" | "qwen-image-edit" | "qwen-image-edit-plus":
            return "qwen-image-edit-2511" if "2511" in name else "qwen-image"
    known = {"3.5-large": "sd3.5-large", "3.5-medium": "sd3.5-medium", "3-medium": "sd3-medium"}
    return next((config for part, config in known.items() if part in name), None)


def footprint(recipe: Recipe, described: Described) -> Footprint:
    """What the recipe's run keeps. ValueError where it cannot be planned (LoRA targets that match nothing, say)."""
    assert isinstance(recipe.policy, DenoisingPolicy), "a writer's memory is not planned"
    model, train = recipe.policy.model, recipe.policy.train
    assert not isinstance(model, ImportedModel)
    copies, dtype, lora = len(copies_needed(recipe)), DTYPES[model.dtype], lora_of(train)
    # Both branches of guidance go through one forward.
    rollouts = [phase.rollout for phase in recipe.resolved_phases()]
    branches = max(2 if isinstance(each, DenoisingRollout) and each.guidance_scale > 1 else 1 for each in rollouts)
    tokens = _tokens(model, described)
    adapter, projection = None, 0
    if isinstance(train, IpAdapter):
        adapter, projection = adapter_counts(described["transformer"], described[_ENCODER], form_of(train))
    setup = Setup(
        lora=None if lora is None else memory.Lora(lora.rank, tuple(lora_targets(recipe.policy))),
        adapter=adapter,
        projection=projection,
        rows=recipe.microbatch * branches,
        tokens=tokens,
        dtype=dtype,
        trained_dtype=dtype if isinstance(train, FullWeights) else torch.float32,
        copies=copies,
        gradient_checkpointing=recipe.policy.gradient_checkpointing,
        ranks=recipe.ranks or 1,
        sharding="zero2" if recipe.sharding == "zero2" else "fsdp" if recipe.sharding == "fsdp2" else "ddp",
    )
    planned = with_head(plan_parts(described, setup), recipe, _seen_by_head(described))
    rows = {row.name: row.bytes for row in planned.rows}
    checkpoint = (1 + copies) * rows["transformer, trained weights"] + rows["AdamW's two moments"] + saved_of_head(planned)
    counts = ", ".join(f"{name} {stored_count(part) / 1e9:.2f} B" for name, part in described.items())
    return Footprint(planned, tokens, checkpoint, counts)


def _seen_by_head(described: Described) -> int:
    """Numbers that a value head reads: of latents and sources, which are no wider than the transformer's input, of the text, and of
    the reference that an IP-Adapter is shown."""
    shape = shape_of(described["transformer"])
    pooled: int = described["transformer"]["config"].get("pooled_projection_dim", 0)
    shown = embed_width(described[_ENCODER]) if _ENCODER in described else 0
    return 2 * (2 * shape.latents + shape.text) + pooled + shown + 1


def _tokens(model: PlaygroundModel | DiffusersModel, described: Described) -> int:
    """Tokens of one row: its text, its output and one source picture where it has any."""
    transformer, vae = described["transformer"]["config"], described["vae"]["config"]
    if model.kind in TEXT_TOKENS:
        # Flux packs 2 x 2 latents into a token before its transformer, whose own patches are of 1.
        side = 2 ** (len(vae["block_out_channels"]) - 1) * (transformer["patch_size"] if model.kind == "sd3" else 2)
        alone = (HEIGHT, WIDTH) if isinstance(model, PlaygroundWords) else _MEGAPIXEL
        sizes = [model.size or alone, *([_MEGAPIXEL] if model.kind == "flux-kontext" else [])]
        return sum(_squares(size, side) for size in sizes) + TEXT_TOKENS[model.kind]
    side = 2 * 2 ** len(vae["temperal_downsample"])
    if model.kind == "qwen-image":
        assert model.size is not None, "the recipe's checks see to it"
        return _squares(model.size, side) + INSTRUCTION_TOKENS
    vision = described["text_encoder"]["config"]["vision_config"]
    seen: int = vision["patch_size"] * vision["spatial_merge_size"]
    if isinstance(model, PlaygroundModel):
        size = model.size or (SIZE, SIZE)
        return 2 * _squares(size, side) + _squares(size, seen) + INSTRUCTION_TOKENS
    editor = EDITORS[model.kind]
    source: int = editor.SOURCE_AREA // side**2
    output = source if model.size is None else _squares(model.size, side)
    read: int = editor.CONDITION_AREA // seen**2
    return output + source + read + INSTRUCTION_TOKENS


def _squares(size: tuple[int, int], side: int) -> int:
    return (size[0] // side) * (size[1] // side)


def check_memory(recipe: Recipe, folder: Path | None, place: Place | None) -> tuple[Finding, int | None]:
    """Whether the plan fits on the place, with the plan line by line where it is of any size; and the bytes of a checkpoint.

    ``folder``: where the weights lie; None, not on this machine.
    """
    assert isinstance(recipe.policy, DenoisingPolicy)
    model = recipe.policy.model
    subject = model.class_ if isinstance(model, ImportedModel) else model.path or "the built-in model"
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
