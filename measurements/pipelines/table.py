"""Writes the tables of docs/models.md: how each pipeline class of diffusers trains, or why it does not.

    python measurements/pipelines/table.py [CLASS ...]

Checks a tiny pipeline with random weights of each class in every_pipeline.py, or prints the rows of the given classes.
"""

import logging
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import diffusers
import every_pipeline as tiny
import numpy as np
import torch
from peft import LoraConfig, PeftModel
from rehearsal.table import insert

from retouch.models.any_pipeline.model import denoiser_name
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.lora import add_lora, attention_layers, write_lora
from retouch.types import Task
from retouch_worlds.testing.pipelines import pipeline_facts

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- pipelines -->"
HEADER = "| class | trains | chain | order | ratio | gradient | targets | export | notes |\n" + "| --- " * 9 + "|"
VARIANTS = {
    "edit": "with a source image",
    "euler": "with a `FlowMatchEulerDiscreteScheduler`",
    "guider": "with a guider that has momentum",
    "v": "with `v_prediction`",
}
FAMILIES = {getattr(family, "pipeline", None): family for family in IMAGE_MODELS.classes() if not getattr(family, "packaged", True)}


def row(name: str) -> str:
    """The row of a class, or of a variant of it, in every_pipeline.py."""
    kind, _, variant = name.partition(":")
    pipe, call = tiny.PIPELINES[name]()
    mask = call.pop("mask_image", None)
    task = Task("row", "a red cube", images=(tiny.photo(64),) if name in tiny.SOURCES else (), mask=mask)
    try:
        facts = pipeline_facts(pipe, task, call=call, num_steps=10)
        faults, export = facts["faults"], "" if facts["faults"] else exported(name, task, {**call, "mask_image": mask})
    except Exception as error:  # noqa: BLE001 - a class that fails is a row of the table
        refused = isinstance(error, ValueError)
        facts, faults, export = {}, [str(error).removeprefix("model: ") if refused else f"{type(error).__name__}: {error}"], ""
    usual = "at different steps"
    notes = [
        VARIANTS.get(variant, ""),
        f"its own adapter is `{FAMILIES[kind].model_fields['kind'].default}`" if kind in FAMILIES else "",
        f"rows of a forward pass: {facts['rows']}" if facts.get("rows", usual) != usual else "",
        "" if faults or facts["targets"] == "yes" else re.sub(r" \(error .*?\)", "", f"targets: {facts['targets']}"),
        *faults,
    ]
    cells = [
        f"`{kind}`",
        "no" if faults else "yes",
        *(_bound(facts.get(value), limit) for value, limit in (("chain", 1e-5), ("order", 1e-5), ("ratio", 1e-6))),
        f"{facts['gradient']:.0%}" if "gradient" in facts else "",
        "" if faults else "yes" if facts["targets"] == "yes" else "no",
        export,
        "; ".join(filter(None, notes)).replace("|", "\\|").replace("\n", " "),
    ]
    return f"| {' | '.join(cells)} |"


def _bound(value: float | None, limit: float) -> str:
    """Other processors round differently, so the page has no digits of a rounding error."""
    return "" if value is None else f"< {limit:.0e}" if value < limit else f"{value:.0e}"


def exported(name: str, task: Task, call: dict[str, Any]) -> str:
    """Write a LoRA with random weights and load it into another pipeline: the format that gives the same latents, or what fails."""
    options = {name: value for name, value in call.items() if value is not None}
    if (argument := tiny.SOURCES.get(name)) is not None:
        options[argument] = list(task.images) if argument == "images" else task.images[0]

    def latents(pipe: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        made = pipe(
            prompt="a red cube", num_inference_steps=4, generator=generator, output_type="latent", return_dict=False, **options
        )[0]
        return np.asarray(made[0], dtype=float)

    (trained, _), (other, _) = tiny.PIPELINES[name](), tiny.PIPELINES[name]()
    part = denoiser_name(trained)
    module, before = getattr(trained, part), latents(trained)
    layers = list(attention_layers(module))
    add_lora(module, LoraConfig(r=4, lora_alpha=32, target_modules=layers, init_lora_weights=False), init_from=None, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        write_lora(module, Path(folder), pipeline=type(trained).__name__)
        if (Path(folder) / "pytorch_lora_weights.safetensors").is_file():
            form = "diffusers"
            other.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")
        else:
            form = "PEFT"
            PeftModel.from_pretrained(getattr(other, part), folder)
    wanted, found = latents(trained), latents(other)
    effect, error = abs(wanted - before).max(), abs(wanted - found).max()
    assert effect > 1e-3 * abs(wanted).max(), f"a LoRA with random weights changes the image only by {effect:.0e}"
    return form if error <= 1e-3 * effect else f"{form}: another image"


def refused() -> str:
    """The classes without a row, by the reason."""
    built = {name.partition(":")[0] for name in tiny.PIPELINES}
    reasons: dict[str, list[str]] = {}
    for name in tiny.image_pipelines():
        if name not in built:
            reasons.setdefault(tiny.why_not(name) or "not looked at yet", []).append(f"`{name}`")
    rows = sorted(reasons.items(), key=lambda each: (len(each[1]), each))
    return "\n".join(["| why not | classes |\n| --- | --- |", *(f"| {reason} | {', '.join(names)} |" for reason, names in rows)])


def main(chosen: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for name in chosen or tiny.PIPELINES:
        rows.append(row(name))
        print(rows[-1], flush=True)
    if not chosen:
        classes = {each.split("`")[1] for each in rows if "` | yes" in each}
        caption = f"diffusers {diffusers.__version__}: {len(classes)} classes train."
        insert(PAGE, MARK, "\n".join([caption, "", HEADER, *rows, "", "These classes have no row:", "", refused()]))


if __name__ == "__main__":
    main(sys.argv[1:])
