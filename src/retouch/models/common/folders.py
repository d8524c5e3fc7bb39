"""Models in local folders: safetensors only, named classes only, no code from the folder."""

from pathlib import Path
from typing import Any

LOCAL: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
"""What every ``from_pretrained`` of weights is told."""


def diffusers_folder(path: Path | str) -> Path:
    """The folder of a pipeline. ValueError where it is none."""
    root = Path(path)
    if not (root / "model_index.json").is_file():
        raise ValueError(f"{root} is no diffusers folder (no model_index.json); download the model and give its local path")
    return root
