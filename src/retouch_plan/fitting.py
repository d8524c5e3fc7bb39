"""Chooses the keys with which a recipe fits on a GPU, in the order of what they cost in time.

A dry run shows what holds memory in each stage. From it, the effect of each key is predicted, all keys that are needed are set at
once, and the next dry run checks them: usually two or three dry runs are enough.
"""

import json
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from retouch.config.imports import is_user_error
from retouch.data.checks import available_cpus
from retouch.models.base import DiffusersModel, PretrainedLanguageModel
from retouch.models.parts import repeated_blocks
from retouch.recipe.document import value_of
from retouch.recipe.keys import Devices
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.records.files import read_json
from retouch_plan.dry_run import (
    ERRORS,
    DryRun,
    dry_run,
    error_line,
    fits,
    holders,
    hours,
    in_own_process,
    largest,
    seconds,
    step_work,
)
from retouch_plan.machines import FREE_SHARE, Machine
from retouch_plan.models import UnknownConfiguration, build_meta
from retouch_plan.system import check_device, machine_of

_log = logging.getLogger("retouch")
_ROUNDS = 8
_ROWS = {
    **{"update": "microbatch", "preflight": "microbatch", "rollout": "rollout.chunk", "render": "rollout.chunk"},
    "evaluation": "eval.batch",
}
"""The key of each stage that says how many rows are computed at once."""
_TILED, _EIGHT_BITS = 0.4, 0.27
"""Predicted shares of the autoencoder's activations with tiling, and of moments in 8 bits; the next dry run measures them."""
_MATTERS = 0.03
"""A key is not set for what holds less than this share of a stage's peak."""
MOST_MICROBATCH, MOST_CHUNK = 16, 64
"""Larger batches fill a GPU no better."""
_DAY, _LEAST_GROUP = 24.0, 8
_FEW_ROWS = 4
"""So many rows compute about as long as the waiting blocks are copied, so blocks wait before there are fewer."""


def fit_device(recipe: Recipe, device: str, *, allow_imports: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sizes of batches and the other keys (dotted), with their values, with which a step of the recipe fits into a GPU;
    none if no dry run of its model is possible.

    ``device``: a GPU's name, a GPU of this machine, or the file of a measured profile. ``allow_imports``: see ``parse``. Raises
    ValueError for an unknown device, and as ``fit``.
    """
    target, finding = check_device(device, device=None, weights_here=True)
    if target is None:
        raise ValueError(finding.text)
    if not all(isinstance(model, DiffusersModel | PretrainedLanguageModel) for model in (recipe.policy.model, recipe.image_model)):
        return {}
    sys.stderr.write(f"choosing what fits into {target.name}, by dry runs of a step\n")
    sys.stderr.flush()
    sizes = most_rows(recipe)
    most = parse(recipe.document(), [f"{key}={value}" for key, value in sizes.items()], allow_imports=allow_imports)
    try:
        return {**sizes, **in_own_process(fit, most, machine_of(target, device), allow_imports)[0]}
    except ERRORS as error:
        if is_user_error(error) and not isinstance(error, UnknownConfiguration):
            raise
        _log.warning("the sizes of batches are not chosen by the memory of %s: %s", target.name, error_line(error))
        return {}


def most_rows(recipe: Recipe) -> dict[str, int]:
    """Return the keys of how many rows are computed at once, with the most with which a GPU gets faster."""
    rows = recipe.tasks_per_step * recipe.group_size
    chunk = min(MOST_CHUNK, rows)
    sizes = {"microbatch": min(MOST_MICROBATCH, rows), "rollout.chunk": chunk, "eval.batch": chunk}
    return sizes | ({"renderer.batch": chunk} if hasattr(recipe.renderer, "batch") else {})


def fit(
    recipe: Recipe, machine: Machine, allow_imports: Sequence[str] = (), *, found: DryRun | None = None
) -> tuple[dict[str, Any], DryRun]:
    """Return the keys (dotted) and values with which one GPU has enough memory for the recipe, none if it fits as it is, and the
    dry run with them.

    ``allow_imports``: see ``parse``. ``found``: a dry run of the recipe, if there is one. Raises ValueError if it does not fit with
    any of them, and the errors that a dry run raises.
    """
    limit, chosen, changed = (1 - FREE_SHARE) * machine.memory, dict[str, Any](), recipe
    found = found or dry_run(recipe, machine, world=1, processes=available_cpus())
    for _ in range(_ROUNDS):
        name, place, size = largest(found)
        if size <= limit:
            return chosen, found
        if _has_rungs(recipe):
            more = _needed(changed, found, place, limit)
        else:
            searched = smallest_changes(recipe, machine, found, world=1, allow_imports=allow_imports)
            more = {key: value_of(value) for key, value in (each.split("=", 1) for each in searched[0])} if searched else {}
        if not more:
            break
        chosen |= more
        settings = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        changed = parse(recipe.document(), settings, allow_imports=allow_imports)
        found = dry_run(changed, machine, world=1, processes=available_cpus())
    held_by = ", ".join(f"{each / 1e9:.1f} GB {holder}" for holder, each in holders(found, name, place)[:3])
    raise ValueError(
        f"{recipe.name} needs {size / 1e9:.1f} GB in {name} ({held_by}), and a tenth of the {machine.memory / 1e9:.1f} GB of "
        f"{machine.name} must stay free: use a GPU with more memory, smaller images or a smaller model"
    )


def _has_rungs(recipe: Recipe) -> bool:
    """Whether ``_rungs`` knows the keys of the recipe: it has a diffusion model, and no phases with settings of their own."""
    model = recipe.policy.model
    return isinstance(recipe.policy, DenoisingPolicyKeys) and isinstance(model, DiffusersModel) and recipe.phases is None


def _needed(recipe: Recipe, found: DryRun, place: int, limit: float) -> dict[str, Any]:
    """Return the keys that all stages need in order to fit on a device, as far as their effects can be predicted."""
    needed: dict[str, Any] = {}
    for stage in found.stages:
        held = Counter(dict(holders(found, stage, place)))
        for overrides in _rungs(recipe, stage.rpartition(": ")[2], held, limit) if held.total() > limit else ():
            for key, value in overrides.items():  # two stages may need the same key
                both = max if key == "devices.swap_blocks" else min
                needed[key] = both(needed.get(key, value), value)
            if held.total() <= limit:
                break
    return needed


def _rungs(recipe: Recipe, kind: str, held: Counter[str], limit: float) -> Iterator[dict[str, Any]]:
    """Yield keys that lower the peak of a stage, the cheapest in time first; ``held`` is then what they are predicted to leave. It
    is empty if the next dry run must measure the effect first."""
    policy, devices = recipe.policy, recipe.devices or Devices()
    assert isinstance(policy, DenoisingPolicyKeys)
    assert isinstance(policy.model, DiffusersModel)
    updates = kind in ("update", "preflight")
    counts = {"microbatch": recipe.microbatch, "rollout.chunk": recipe.rollout.chunk, "eval.batch": recipe.eval.batch}
    key = _ROWS.get(kind, "")
    rows = counts.get(key, 1)
    few = max(count for count in range(1, _FEW_ROWS + 1) if rows % count == 0)

    def keep(share: float, *names: str) -> bool:
        """Predict that this share of the holders remains. Returns whether they hold anything that matters."""
        mine = [name for name in held if name.startswith(names)]
        matters = sum(held[name] for name in mine) > _MATTERS * held.total()
        for name in mine:
            held[name] = int(held[name] * share)
        return matters

    if kind == "build" and policy.prompt_embeddings == "cached":  # only the text encoders are on the device then
        bits = None if policy.base is None else policy.base.text_encoders
        # Their copies on the device have no label.
        if policy.train.kind != "full" and bits != "4bit" and keep(0.55, "weights: text_encoder", "other"):
            yield {"policy.base.text_encoders": "8bit" if bits is None else "4bit"}
        return

    def fewer_rows() -> Iterator[dict[str, Any]]:
        """The most rows with which the stage fits, if it does with any number of them."""
        active = sum(size for name, size in held.items() if name.startswith("activations"))
        room = limit - held.total() + active
        least = few if devices.swap_blocks else 1
        found = [count for count in range(least, rows) if rows % count == 0 and active * count / rows <= room]
        if found and held.total() > limit:
            keep(found[-1] / rows, "activations")
            yield {key: found[-1]}

    yield from fewer_rows()
    if updates and not policy.gradient_checkpointing and keep(1, "activations"):
        held.clear()
        yield {"policy.gradient_checkpointing": True}
    if policy.prompt_embeddings == "live" and keep(0, "weights: text_encoder"):
        yield {"policy.prompt_embeddings": "cached"}
        yield from fewer_rows()
    if not policy.model.vae_slicing and rows > 1 and keep(1 / rows, "activations: autoencoder"):
        yield {"policy.model.vae_slicing": True}
    if not policy.model.vae_tiling and keep(_TILED, "activations: autoencoder"):
        yield {"policy.model.vae_tiling": True}
    if recipe.optimizer.moments is None and recipe.sharding is None and keep(_EIGHT_BITS, "AdamW's moments"):
        yield {"optimizer.moments": "8bit"}
        yield from fewer_rows()
    if not devices.offload and keep(0, "weights: text_encoder", "weights: vae"):
        yield {"devices.offload": True}
        yield from fewer_rows()
    if few < rows and keep(few / rows, "activations"):
        yield {key: few}
    quantized = policy.base and policy.base.quantize
    sizes = [size // (2 if quantized else 1) for size in block_bytes(policy.model)]
    swappable = policy.train.kind != "full" and policy.compile is None and recipe.sharding is None and quantized != "4bit"
    if swappable and "weights: transformer" in held and devices.swap_blocks < len(sizes):
        # ``held`` no longer contains what is swapped already. Two blocks are on the device while they compute.
        excess = held.total() - limit + (0 if devices.swap_blocks else 2 * max(sizes))
        waiting = sizes[: len(sizes) - devices.swap_blocks]
        more = next((count for count in range(1, len(waiting)) if sum(waiting[-count:]) >= excess), len(waiting))
        held["weights: transformer"] -= math.ceil(held.total() - limit)
        checkpointed = {} if policy.gradient_checkpointing else {"policy.gradient_checkpointing": True}
        yield {"devices.swap_blocks": devices.swap_blocks + more, **checkpointed}
    if updates and policy.gradient_checkpointing is True and keep(1, "activations"):
        held.clear()
        yield {"policy.gradient_checkpointing": "cpu"}
    if few > 1 and keep(1 / few, "activations"):
        yield {key: 1}


def block_bytes(model: DiffusersModel) -> list[int]:
    """Return the bytes of each block of a model's transformer, in order; none if its configuration is not known."""
    folder = model.find_weights()[0]
    described: Mapping[str, Any] | None = (model.published() or {}).get("transformer")
    if folder is not None and (folder / "transformer" / "config.json").is_file():
        config = read_json(folder / "transformer" / "config.json")
        described = {"class": config["_class_name"], "config": config}
    if described is None:
        return []
    itemsize = getattr(torch, model.dtype).itemsize
    return [itemsize * sum(weight.numel() for weight in block.parameters()) for block in repeated_blocks(build_meta(described))]


# Changes for a GPU of any number of ranks, found one at a time

LEAST_GAIN = 0.01
"""A change is kept if it lowers the peak of its stage by at least this fraction."""
MOST_CHANGES = 6
_FEWEST_LOGITS = 32


def changes(recipe: Recipe, stage: str, *, held: Mapping[str, int], world: int) -> Iterator[str]:
    """Yield ``--set`` changes that may lower the peak of a stage and that the recipe allows, the cheapest in speed first.

    ``held``: the bytes of each holder at the peak. Parts that hold less than ``LEAST_GAIN`` of it are left where they are.
    ``world``: the number of ranks.
    """
    kind = stage.rpartition(": ")[2]
    policy, renderer, image_model = recipe.policy, recipe.renderer, recipe.image_model
    least = LEAST_GAIN * sum(held.values())
    moments, encoders, autoencoder = (
        sum(size for name, size in held.items() if name.startswith(part))
        for part in ("AdamW's moments", "weights: text_encoder", "weights: vae")
    )
    updates = kind not in ("encode", "rollout", "render", "evaluation")
    decodes = not updates or kind == "preflight"  # a preflight has a rollout and an update
    smaller_chunk = [f"rollout.chunk={recipe.rollout.chunk // 2}"] if recipe.phases is None and recipe.rollout.chunk > 1 else []
    # Fewer images at once while images are sampled, encoded or decoded
    if decodes and isinstance(image_model, DiffusersModel) and not image_model.vae_slicing:
        yield f"{recipe.image_model_key}.vae_slicing=true"
    if kind in ("render", "evaluation"):
        sizes = {key: getattr(renderer, key, 1) for key in ("batch", "encoder_batch")}
        yield from (f"renderer.{key}={size // 2}" for key, size in sizes.items() if size > 1)
    if kind in ("rollout", "render"):
        yield from smaller_chunk
    if kind == "evaluation" and recipe.eval.batch > 1:
        yield f"eval.batch={recipe.eval.batch // 2}"
    if moments >= least and recipe.optimizer.moments is None and recipe.sharding is None:
        yield "optimizer.moments=8bit"
    # Fewer activations at once in an update
    if updates and not policy.gradient_checkpointing:
        yield "policy.gradient_checkpointing=true"
    if recipe.microbatch > 1:
        yield f"microbatch={recipe.microbatch // 2}"
    if updates and isinstance(policy, AutoregressivePolicyKeys) and policy.logits_at_once > _FEWEST_LOGITS:
        yield f"policy.logits_at_once={policy.logits_at_once // 2}"
    if kind == "preflight":
        yield from smaller_chunk
    # Parts in CPU memory while they are not used, and decoding in tiles
    own = policy if isinstance(policy, DenoisingPolicyKeys) and isinstance(policy.model, DiffusersModel) else None
    if own is not None and own.prompt_embeddings == "live" and encoders >= least:
        yield "policy.prompt_embeddings=cached"
    if moments >= least and recipe.optimizer.moments != "cpu" and recipe.sharding in (None, "fsdp2"):
        yield "optimizer.moments=cpu"
    if decodes and isinstance(image_model, DiffusersModel) and not image_model.vae_tiling:
        yield f"{recipe.image_model_key}.vae_tiling=true"
    behind_writer = renderer is not None and renderer.image_model is not None
    frozen = own is not None and encoders + autoencoder >= least
    if (behind_writer or frozen) and not (recipe.devices and recipe.devices.offload):
        yield "devices.offload=true"
    if world > 1 and recipe.sharding != "fsdp2" and isinstance(policy, DenoisingPolicyKeys):
        yield "sharding=fsdp2"
    if world > 1 and recipe.sharding == "fsdp2" and (recipe.devices is None or recipe.devices.weights is None):
        yield "devices.weights=cpu"


def smallest_changes(
    recipe: Recipe, machine: Machine, found: DryRun, *, world: int | None, allow_imports: Sequence[str] = ()
) -> tuple[tuple[str, ...], int] | None:
    """Return ``--set`` changes with which the recipe fits, and its peak with them in bytes; None if no changes were found.

    For a diffusion model on one GPU, ``fit`` chooses them. Otherwise changes are added one at a time: the first change whose dry
    run lowers the peak of the stage with the largest peak. Changes that are not needed after later ones are dropped.
    ``allow_imports``: see ``parse``.
    """
    if (world or recipe.ranks or 1) == 1 and _has_rungs(recipe):
        try:
            keys, fitted = fit(recipe, machine, allow_imports, found=found)
        except ERRORS:
            return None
        words = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
        return tuple(f"{key}={word}" for key, word in words.items()), fitted.peak

    def tried(options: Sequence[str]) -> DryRun | None:
        try:
            changed = parse(recipe.document(), options, allow_imports=allow_imports)
            return dry_run(changed, machine, world=world, processes=available_cpus())
        except ERRORS:
            return None  # for example, the smaller chunk does not divide the groups

    settings: tuple[str, ...] = ()
    for _ in range(MOST_CHANGES):
        current = parse(recipe.document(), settings, allow_imports=allow_imports)
        stage = max(found.stages, key=lambda name: found.stages[name].peak)
        held = max((labels for _, labels in found.stages[stage].peaks.values()), key=lambda each: each.total())
        for change in changes(current, stage, held=held, world=world or recipe.ranks or 1):
            changed = (*(each for each in settings if each.partition("=")[0] != change.partition("=")[0]), change)
            after = tried(changed)
            if after is None:
                continue
            if fits(after, machine):
                for each in changed[:-1]:
                    fewer = tuple(kept for kept in changed if kept != each)
                    found_fewer = tried(fewer)
                    if found_fewer is not None and fits(found_fewer, machine):
                        changed, after = fewer, found_fewer
                return changed, after.peak
            if after.stages[stage].peak <= (1 - LEAST_GAIN) * found.stages[stage].peak:
                settings, found = changed, after
                break
        else:
            return None
    return None


def within_a_day(recipe: Recipe, found: DryRun, machine: Machine) -> dict[str, int]:
    """Return fewer tasks of smaller groups, and fewer steps if that is not enough, with which the run is forecast to end within a
    day; nothing if it does as it is, or if it has phases.

    Groups keep at least 8 samples, because the advantage of a sample is its distance from the mean of its group.
    """
    total = hours(found, machine)
    if total <= _DAY or recipe.phases is not None or recipe.steps is None:
        return {}
    evaluations = total - recipe.steps * seconds(step_work(found, 0), machine) / 3600
    rows = recipe.tasks_per_step * recipe.group_size
    most = rows * max(0.0, (_DAY - evaluations) / (total - evaluations))
    group, tasks = recipe.group_size, recipe.minibatches * found.world
    while group % 2 == 0 and group >= 2 * _LEAST_GROUP and group * 4 > most:
        group //= 2
    tasks *= max(1, int(most / (group * tasks)))
    fewer = {"tasks_per_step": tasks, "group_size": group}
    after = total - (total - evaluations) * (1 - tasks * group / rows)
    if after > _DAY:
        fewer["steps"] = max(1, int(recipe.steps * _DAY / after))
    return {key: value for key, value in fewer.items() if getattr(recipe, key) != value}
