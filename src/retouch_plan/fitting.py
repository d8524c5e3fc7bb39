"""Chooses the keys with which a recipe fits on a GPU, in the order of what they cost in time.

A dry run shows what holds memory in each stage. From it, the effect of each key is predicted, all keys that are needed are set at
once, and the next dry run checks them: usually two or three dry runs are enough.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from retouch.config.imports import is_user_error
from retouch.data.checks import available_cpus
from retouch.models.base import DiffusersModel, PretrainedLanguageModel
from retouch.models.parts import build_meta, repeated_blocks
from retouch.recipe.document import value_of
from retouch.recipe.keys import Devices
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.records.files import read_json
from retouch_plan.dry_run import dry_run, in_own_process
from retouch_plan.estimate import ERRORS, error_line, holders, largest, smallest_changes
from retouch_plan.machines import FREE_SHARE, Machine
from retouch_plan.models import UnknownConfiguration
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
    rows = recipe.tasks_per_step * recipe.group_size
    chunk = min(MOST_CHUNK, rows)
    sizes = {"microbatch": min(MOST_MICROBATCH, rows), "rollout.chunk": chunk, "eval.batch": chunk}
    sizes |= {"renderer.batch": chunk} if hasattr(recipe.renderer, "batch") else {}
    most = parse(recipe.document(), [f"{key}={value}" for key, value in sizes.items()], allow_imports=allow_imports)
    try:
        return {**sizes, **in_own_process(fit, most, machine_of(target, device), allow_imports)}
    except ERRORS as error:
        if is_user_error(error) and not isinstance(error, UnknownConfiguration):
            raise
        _log.warning("the sizes of batches are not chosen by the memory of %s: %s", target.name, error_line(error))
        return {}


def fit(recipe: Recipe, machine: Machine, allow_imports: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys (dotted) and values with which one GPU has enough memory for the recipe; none if it fits as it is.

    ``allow_imports``: see ``parse``. Raises ValueError if it does not fit with any of them, and the errors that a dry run raises.
    """
    limit, chosen = (1 - FREE_SHARE) * machine.memory, dict[str, Any]()
    for _ in range(_ROUNDS):
        settings = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
        changed = parse(recipe.document(), settings, allow_imports=allow_imports)
        found = dry_run(changed, machine, world=1, processes=available_cpus())
        name, place, size = largest(found)
        if size <= limit:
            return chosen
        if not isinstance(recipe.policy, DenoisingPolicyKeys) or not isinstance(recipe.policy.model, DiffusersModel):
            searched = smallest_changes(recipe, machine, found, world=1, allow_imports=allow_imports)
            if searched is None:
                break
            return {key: value_of(value) for key, value in (each.split("=", 1) for each in searched[0])}
        more: dict[str, Any] = {}
        for stage in found.stages:
            held = Counter(dict(holders(found, stage, place)))
            for overrides in _rungs(changed, stage.rpartition(": ")[2], held, limit) if held.total() > limit else ():
                for key, value in overrides.items():  # two stages may need the same key
                    both = max if key == "devices.swap_blocks" else min
                    more[key] = both(more.get(key, value), value)
                if held.total() <= limit:
                    break
        if not more:
            break
        chosen |= more
    held_by = ", ".join(f"{each / 1e9:.1f} GB {holder}" for holder, each in holders(found, name, place)[:3])
    raise ValueError(
        f"{recipe.name} needs {size / 1e9:.1f} GB in {name} ({held_by}), and a tenth of the {machine.memory / 1e9:.1f} GB of "
        f"{machine.name} must stay free: use a GPU with more memory, smaller images or a smaller model"
    )


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

    def keep(share: float, *names: str) -> bool:
        """Predict that this share of the holders remains. Returns whether they hold anything that matters."""
        mine = [name for name in held if name.startswith(names)]
        matters = sum(held[name] for name in mine) > _MATTERS * held.total()
        for name in mine:
            held[name] = int(held[name] * share)
        return matters

    if kind == "build" and policy.prompt_embeddings == "cached":  # only the text encoders are on the device then
        bits = None if policy.base is None else policy.base.text_encoders
        if policy.train.kind != "full" and bits != "4bit" and keep(0.55, "weights: text_encoder"):
            yield {"policy.base.text_encoders": "8bit" if bits is None else "4bit"}
        return

    def fewer_rows() -> Iterator[dict[str, Any]]:
        """The most rows with which the stage fits, if it does with any number of them."""
        active = sum(size for name, size in held.items() if name.startswith("activations"))
        room = limit - held.total() + active
        found = [count for count in range(1, rows) if rows % count == 0 and active * count / rows <= room]
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
    if rows > 1 and keep(1 / rows, "activations"):
        yield {key: 1}
    if updates and policy.gradient_checkpointing is True and keep(1, "activations"):
        held.clear()
        yield {"policy.gradient_checkpointing": "cpu"}
    bits = getattr(policy.base, "quantize", None)
    sizes = [size // (2 if bits else 1) for size in block_bytes(policy.model)]
    swappable = policy.train.kind != "full" and policy.compile is None and recipe.sharding is None and bits != "4bit"
    if swappable and "weights: transformer" in held and devices.swap_blocks < len(sizes):
        # ``held`` no longer contains what is swapped already. Two blocks are on the device while they compute.
        excess = held.total() - limit + (0 if devices.swap_blocks else 2 * max(sizes))
        waiting = sizes[: len(sizes) - devices.swap_blocks]
        more = next((count for count in range(1, len(waiting)) if sum(waiting[-count:]) >= excess), len(waiting))
        held["weights: transformer"] -= int(held.total() - limit)
        checkpointed = {} if policy.gradient_checkpointing else {"policy.gradient_checkpointing": True}
        yield {"devices.swap_blocks": devices.swap_blocks + more, **checkpointed}


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
