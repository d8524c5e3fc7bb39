"""`retouch export`: what a run trained, as weights that diffusers and PEFT load.

A LoRA becomes ``pytorch_lora_weights.safetensors`` (for a pipeline's ``load_lora_weights``) and ``adapter_model.safetensors``
with ``adapter_config.json`` (``PeftModel.from_pretrained``); an IP-Adapter ``ip_adapter.safetensors`` (for a Flux pipeline's
``load_ip_adapter`` where it is of that form, see ``models/ip_adapter/files.py``) with ``ip_adapter.json``, how it is made; full
weights become a folder ``transformer``, a writer's ``writer`` (``from_pretrained``).
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from retouch.assembly.assembly import Assembly
from retouch.inference.opening import open_target
from retouch.records import files
from retouch.records.libraries import versions

Which = Literal["average", "current"]


def export_target(target: str, *, to: Path, which: Which | None = None) -> list[Path]:
    """Write the weights of a run's newest checkpoint to the folder ``to``, and return the files.

    ``which``: ``average`` (what evaluation and `retouch sample` use, and the default where the run keeps one) or ``current``.
    ``export.json`` beside them has the recipe and the step. Raises ValueError if ``to`` is not empty, the target was never trained,
    or there is no average."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"--to {to}: the folder is not empty; name a new one")
    parts, step = open_target(target)
    parts.judge.close()
    if step == 0:
        raise ValueError(f"{target} is not a run; name the folder of a trained run")
    if which == "average" and "average" not in parts.copies.copies:
        raise ValueError("--weights average: this run kept no average (policy.ema); use current")
    return write_export(parts, to, step=step, which=which)


def write_export(parts: Assembly, to: Path, *, step: int, which: Which | None = None) -> list[Path]:
    """The parts' weights, as they are after ``step``, and ``export.json``; the files."""
    chosen = which or ("average" if "average" in parts.copies.copies else "current")
    to.mkdir(parents=True, exist_ok=True)
    with parts.copies.using("average") if chosen == "average" else nullcontext():
        _write_weights(parts, to)
    about = {"recipe": parts.recipe.document(), "step": step, "weights": chosen, "versions": versions(to)}
    files.write_json(to / "export.json", about)
    return sorted(path for path in to.rglob("*") if path.is_file())


def _write_weights(parts: Assembly, to: Path) -> None:
    """The weights as they are now: adapters in the formats of their readers, or the whole transformer."""
    policy = parts.recipe.policy
    folder = policy.exported_as
    policy.train.export(parts.model.module, to, folder=folder, pipeline=policy.model.pipeline)
