"""`retouch export`: the trained weights of a run in the formats of diffusers, PEFT and ComfyUI.

A LoRA is written as ``pytorch_lora_weights.safetensors`` (for a pipeline's ``load_lora_weights``), ``adapter_model.safetensors``
with ``adapter_config.json`` (for ``PeftModel.from_pretrained``), and ``comfyui_lora.safetensors`` (if ComfyUI supports the model
family, see ``models/common/comfyui_lora.py``). An IP-Adapter is written as ``ip_adapter.safetensors``, which a Flux pipeline can
load with ``load_ip_adapter`` if the adapter has the required form (see ``models/ip_adapter/adapter.py``), and ``ip_adapter.json``
with its settings. Full weights are written to a folder ``transformer``, those of a writer to ``writer`` (for ``from_pretrained``).
``README.md`` is the model card.
"""

import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from retouch.inference.model_card import write_card
from retouch.inference.opening import open_policy, read_target
from retouch.models.train import ExportFiles, Format
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.records.libraries import silence_libraries, versions
from retouch.run.build import PolicyParts

Which = Literal["average", "current"]


def export_target(target: str, *, to: Path, which: Which | None = None, format: Format = "all") -> list[Path]:
    """Write the weights of a run's newest checkpoint to the folder ``to``, and return the files.

    ``which``: the weights, ``average`` (which evaluation and `retouch sample` use; the default if the run has an average) or
    ``current``. ``format``: the format of a LoRA. ``export.json`` contains the recipe and the step. Data and reward are not loaded,
    so they may be objects of the script that trained the run. Raises ValueError if ``to`` is a file or not empty, if the target was
    never trained, if there is no average, or if the model has no such format."""
    if to.exists() and not to.is_dir():
        raise ValueError(f"--to {to}: this is a file; name a new folder")
    if to.exists() and any(to.iterdir()):
        raise ValueError(f"--to {to}: the folder is not empty; name a new one")
    recipe, folder = read_target(target)
    if folder is None:
        raise ValueError(f"{target} is not a run; name the folder of a trained run")
    silence_libraries()
    parts, step = open_policy(recipe, folder)
    if which == "average" and "average" not in parts.copies.copies:
        raise ValueError("--weights average: this run kept no average (policy.ema); use current")
    return write_export(parts, to, step=step, which=which, format=format, run=folder, recipe=recipe)


def write_export(
    parts: PolicyParts,
    to: Path,
    *,
    step: int,
    which: Which | None = None,
    format: Format = "all",
    run: RunFolder | None = None,
    recipe: Recipe | None = None,
) -> list[Path]:
    """Write the weights of ``parts`` after step ``step``, with ``export.json`` and the model card; returns the files.

    ``run``: the run's folder, if it is not the folder in the recipe. ``recipe``: the recipe of the run, if ``parts`` were built
    from another one. Raises ValueError if the model has no such format.
    """
    _check_format(parts, format)
    chosen = which or ("average" if "average" in parts.copies.copies else "current")
    to.mkdir(parents=True, exist_ok=True)
    with parts.copies.using("average") if chosen == "average" else nullcontext():
        _write_weights(parts, to, format)
    about = {"recipe": (recipe or parts.recipe).document(), "step": step, "weights": chosen, "versions": versions(to)}
    files.write_json(to / "export.json", about)
    write_card(parts, to, run or RunFolder(parts.recipe.folder), step=step)
    # safetensors creates its files for their owner only, whatever the umask; `export.json` has the mode that the umask allows.
    mode = stat.S_IMODE((to / "export.json").stat().st_mode)
    for path in to.rglob("*.safetensors"):
        path.chmod(mode)
    return sorted(path for path in to.rglob("*") if path.is_file())


def _check_format(parts: PolicyParts, format: Format) -> None:
    policy = parts.recipe.policy
    if format == "all":
        return
    if policy.train.lora is None:
        raise ValueError(f"--format {format}: this run trained no LoRA; export without --format")
    model = policy.model
    if (format == "diffusers" and model.pipeline is None) or (format == "comfyui" and model.comfyui is None):
        raise ValueError(f"--format {format}: a LoRA of {model.source} has no such format; choose peft or all")


def _write_weights(parts: PolicyParts, to: Path, format: Format) -> None:
    """Write the weights that are loaded: adapters in the formats of ``format``, or the whole transformer."""
    policy = parts.recipe.policy
    model = policy.model
    written = ExportFiles(folder=policy.exported_as, pipeline=model.pipeline, comfyui=model.comfyui, format=format)
    policy.train.export(parts.model.module, to, written)
