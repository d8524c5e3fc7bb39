"""`retouch export`: what a run trained, as weights that diffusers, PEFT and ComfyUI load.

A LoRA becomes ``pytorch_lora_weights.safetensors`` (for a pipeline's ``load_lora_weights``), ``adapter_model.safetensors`` with
``adapter_config.json`` (``PeftModel.from_pretrained``), and ``comfyui_lora.safetensors`` (for ComfyUI, if it knows the family, see
``models/common/comfyui_lora.py``); an IP-Adapter ``ip_adapter.safetensors`` (for a Flux pipeline's
``load_ip_adapter`` where it is of that form, see ``models/ip_adapter/files.py``) with ``ip_adapter.json``, how it is made; full
weights become a folder ``transformer``, a writer's ``writer`` (``from_pretrained``). ``README.md`` is the model card.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from retouch.assembly.assembly import Assembly
from retouch.inference.model_card import write_card
from retouch.inference.opening import open_target
from retouch.models.train import Format, Written
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.records.libraries import versions

Which = Literal["average", "current"]


def export_target(target: str, *, to: Path, which: Which | None = None, format: Format = "all") -> list[Path]:
    """Write the weights of a run's newest checkpoint to the folder ``to``, and return the files.

    ``which``: ``average`` (what evaluation and `retouch sample` use, and the default where the run keeps one) or ``current``.
    ``format``: the format of a LoRA. ``export.json`` has the recipe and the step. Raises ValueError if ``to`` is not empty, the
    target was never trained, there is no average, or the model has no such format."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"--to {to}: the folder is not empty; name a new one")
    parts, step = open_target(target)
    parts.judge.close()
    if step == 0:
        raise ValueError(f"{target} is not a run; name the folder of a trained run")
    if which == "average" and "average" not in parts.copies.copies:
        raise ValueError("--weights average: this run kept no average (policy.ema); use current")
    return write_export(parts, to, step=step, which=which, format=format, run=RunFolder(Path(target)))


def write_export(
    parts: Assembly, to: Path, *, step: int, which: Which | None = None, format: Format = "all", run: RunFolder | None = None
) -> list[Path]:
    """Write the parts' weights, as they are after ``step``, with ``export.json`` and the model card; returns the files.

    ``run``: the run's folder if it was moved. Raises ValueError if the model has no such format.
    """
    _check_format(parts, format)
    chosen = which or ("average" if "average" in parts.copies.copies else "current")
    to.mkdir(parents=True, exist_ok=True)
    with parts.copies.using("average") if chosen == "average" else nullcontext():
        _write_weights(parts, to, format)
    about = {"recipe": parts.recipe.document(), "step": step, "weights": chosen, "versions": versions(to)}
    files.write_json(to / "export.json", about)
    write_card(parts, to, run or RunFolder(parts.recipe.folder), step=step)
    return sorted(path for path in to.rglob("*") if path.is_file())


def _check_format(parts: Assembly, format: Format) -> None:
    policy = parts.recipe.policy
    if format == "all":
        return
    if policy.train.lora is None:
        raise ValueError(f"--format {format}: this run trained no LoRA; export without --format")
    model = policy.model
    if (format == "diffusers" and model.pipeline is None) or (format == "comfyui" and model.comfyui is None):
        raise ValueError(f"--format {format}: a LoRA of {model.source} has no such format; choose peft or all")


def _write_weights(parts: Assembly, to: Path, format: Format) -> None:
    """The weights as they are now: adapters in the formats of their readers, or the whole transformer."""
    policy = parts.recipe.policy
    model = policy.model
    written = Written(folder=policy.exported_as, pipeline=model.pipeline, comfyui=model.comfyui, format=format)
    policy.train.export(parts.model.module, to, written)
