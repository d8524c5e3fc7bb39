"""A recipe for a folder of small photographs: the playground's editor, two denoising steps, and a reward for a colour."""

import json
from pathlib import Path
from typing import Any

from retouch.recipe.recipe import load


def photos_recipe(root: Path, photos: Path, **changes: Any) -> Path:
    """Write the recipe for a folder of ``photos`` and return its file. ``changes``: values of keys, or dictionaries of sections."""
    words = [
        f"data.path={photos}",
        "data.size=[24,24]",
        "policy.model.size=[24,24]",
        f"out={root / 'runs'}",
        "device=cpu",
        "steps=2",
        "group_size=2",
        "rollout.num_steps=2",
        "data.held_out=1",
    ]
    for key, value in changes.items():
        pairs = {f"{key}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {key: value}
        words += [f"{path}={json.dumps(each)}" for path, each in pairs.items()]
    file = root / "photos.json"
    file.write_text(load("recipes/photos.jsonnet", words).model_dump_json())
    return file
