"""Chooses the keys with which a recipe fits on a GPU, in the order of what they cost in time.

A dry run shows what holds memory in each stage. From it, the effect of each key is predicted, all keys that are needed are set at
once, and the next dry run checks them: usually two or three dry runs are enough.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from retouch.models.base import DiffusersModel
from retouch.models.parts import build_meta, repeated_blocks
from retouch.recipe.document import value_of
from retouch.recipe.keys import Devices
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.records.files import read_json
from retouch_plan.dry_run import dry_run
from retouch_plan.estimate import holders, largest, smallest_changes
from retouch_plan.machines import FREE_SHARE, Machine

_ROUNDS = 6
_ROWS = {"update": "microbatch", "preflight": "microbatch", "rollout": "rollout.chunk", "render": "rollout.chunk"}
_CHECKPOINTED, _TILED, _EIGHT_BITS, _KEPT_INPUTS = 0.15, 0.4, 0.27, 0.7
"""Predicted shares that remain, until the next dry run measures them: of activations with gradient checkpointing, of the
autoencoder's activations with tiling, of moments in 8 bits, of activations whose block inputs are in CPU memory."""


def fit(recipe: Recipe, machine: Machine, *, processes: int = 1) -> dict[str, Any]:
    """Return the keys (dotted) and values with which one GPU has enough memory for the recipe; none if it fits as it is.

    ``processes``: see ``dry_run``; a second process imports the main module again, so a script needs 1. Raises ValueError if it
    does not fit with any of them, and the errors that a dry run raises.
    """
    limit, chosen = (1 - FREE_SHARE) * machine.memory, dict[str, Any]()
    for _ in range(_ROUNDS):
        changed = parse(recipe.document(), [f"{key}={json.dumps(value)}" for key, value in chosen.items()])
        found = dry_run(changed, machine, world=1, processes=processes)
        name, place, size = largest(found)
        if size <= limit:
            return chosen
        if not isinstance(recipe.policy, DenoisingPolicyKeys) or not isinstance(recipe.policy.model, DiffusersModel):
            settings = smallest_changes(recipe, machine, found, world=1)
            if settings is None:
                break
            return {key: value_of(value) for key, value in (each.split("=", 1) for each in settings[0])}
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
    """Yield keys that lower the peak of a stage, the cheapest in time first; ``held`` is then what they are predicted to leave."""
    policy, devices = recipe.policy, recipe.devices or Devices()
    assert isinstance(policy, DenoisingPolicyKeys)
    assert isinstance(policy.model, DiffusersModel)
    updates = kind in ("update", "preflight")

    def keep(share: float, *names: str) -> bool:
        """Predict that this share of the holders remains. Returns whether they hold anything that matters."""
        mine = [name for name in held if name.startswith(names)]
        matters = sum(held[name] for name in mine) > 0.01 * held.total()
        for name in mine:
            held[name] = int(held[name] * share)
        return matters

    active = sum(size for name, size in held.items() if name.startswith("activations"))
    key = _ROWS.get(kind, "eval.batch" if kind == "evaluation" else None)
    rows = {"microbatch": recipe.microbatch, "rollout.chunk": recipe.rollout.chunk, "eval.batch": recipe.eval.batch}.get(
        key or "", 1
    )
    fitting = int(rows * max(limit - held.total() + active, 0) // max(active, 1))
    if updates and not policy.gradient_checkpointing and fitting < 1 and keep(_CHECKPOINTED, "activations"):
        yield {"policy.gradient_checkpointing": True}
    elif key is not None and rows > 1:
        fewer = max(count for count in range(1, rows + 1) if rows % count == 0 and count <= max(fitting, 1))
        if keep(fewer / rows, "activations"):
            yield {key: fewer}
    if policy.prompt_embeddings == "live" and keep(0, "weights: text_encoder"):
        yield {"policy.prompt_embeddings": "cached"}
    if not policy.model.vae_slicing and rows > 1 and keep(1 / rows, "activations: autoencoder"):
        yield {"policy.model.vae_slicing": True}
    if not policy.model.vae_tiling and keep(_TILED, "activations: autoencoder"):
        yield {"policy.model.vae_tiling": True}
    if recipe.optimizer.moments is None and recipe.sharding is None and keep(_EIGHT_BITS, "AdamW's moments"):
        yield {"optimizer.moments": "8bit"}
    if not devices.offload and keep(0, "weights: text_encoder", "weights: vae"):
        yield {"devices.offload": True}
    if updates and policy.gradient_checkpointing is True and keep(_KEPT_INPUTS, "activations"):
        yield {"policy.gradient_checkpointing": "cpu"}
    if policy.train.kind == "full" or policy.compile is not None or recipe.sharding is not None:
        return
    sizes = block_bytes(policy.model)
    more = next((n for n in range(3, len(sizes)) if sum(sizes[-n:]) - 2 * max(sizes) >= held.total() - limit), len(sizes))
    # What is swapped already is no longer in ``held``.
    if sizes and devices.swap_blocks < len(sizes) and kind != "build":
        held["weights: transformer"] -= sum(sizes[-more:]) - 2 * max(sizes)
        yield {
            **{"devices.swap_blocks": min(len(sizes), devices.swap_blocks + more)},
            **({} if policy.gradient_checkpointing else {"policy.gradient_checkpointing": True}),
        }


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
