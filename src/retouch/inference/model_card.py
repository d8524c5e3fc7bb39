"""The model card of an export: ``README.md`` with the metadata of the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCardData

from retouch.config.live import LIVE
from retouch.core.intervals import MeanEstimate
from retouch.inference.side_by_side import before_and_after
from retouch.models.common.comfyui_lora import FILE as COMFYUI_FILE
from retouch.models.common.parts import frozen_hashes
from retouch.records.heldout import paired_change, read_scores, read_sources
from retouch.records.summary import split_label

if TYPE_CHECKING:
    from retouch.records.folder import RunFolder
    from retouch.run.build import PolicyParts

IMAGE = "before-and-after.png"
_BASE = "BASE_MODEL"
_LICENCES: tuple[tuple[str, str, str | None], ...] = (
    ("stabilityai/stable-diffusion-3", "other", "stabilityai-ai-community"),
    ("black-forest-labs/FLUX.1-schnell", "apache-2.0", None),
    ("black-forest-labs/FLUX.1-", "other", "flux-1-dev-non-commercial-license"),
    ("black-forest-labs/FLUX.2-klein-4B", "apache-2.0", None),
    ("black-forest-labs/FLUX.2-klein-base-4B", "apache-2.0", None),
    ("black-forest-labs/FLUX.2-", "other", "flux-non-commercial-license"),
    ("Qwen/Qwen-Image-2", "", None),
    ("Qwen/Qwen-Image", "apache-2.0", None),
    ("Tongyi-MAI/Z-Image", "apache-2.0", None),
)
"""(start of the base model's id, ``license``, ``license_name``), from the model cards of the base models. The first match is used.
An empty string means that the licence is not known."""
_SETTINGS = (
    ("objective", "objective.kind"),
    ("advantage", "advantage.kind"),
    ("LoRA rank", "policy.train.rank"),
    ("LoRA alpha", "policy.train.alpha"),
    ("learning rate", "learning_rate"),
    ("tasks per step", "tasks_per_step"),
    ("samples per task", "group_size"),
    ("sampling steps", "rollout.num_steps"),
    ("guidance scale", "rollout.guidance_scale"),
    ("noise level", "rollout.transition.noise_level"),
    ("reward", "reward.kind"),
    ("data", "data.kind"),
    ("seed", "seed"),
)


def write_card(parts: PolicyParts, to: Path, run: RunFolder, *, step: int) -> None:
    """Write the ``README.md`` of the export in the folder ``to``, and the image of held-out samples if the run has samples."""
    policy, document = parts.recipe.policy, parts.recipe.document()
    split = parts.recipe.eval.split
    base, is_hub_id = _base_model(getattr(policy.model, "path", None) or policy.model.source)
    if changed := _changed_parts(parts):
        base, is_hub_id = f"a model like {base}, but with other weights ({', '.join(changed)})", False
    text = [
        f"# {parts.recipe.name}",
        f"{_what(to)} for {base}, trained for {step} steps with rewards by Retouch.",
    ]
    if changed:
        text.append("With other base weights, it makes other images. Load the weights from which training started first.")
    if (table := _scores(run, step, split=split)) is not None:
        text += ["## Evaluation", table]
    if _write_image(run, to / IMAGE, step=step):
        text += ["## Samples", f"![Held-out samples before and after training]({IMAGE})"]
    module, dtype = type(parts.model.module).__name__, getattr(policy.model, "dtype", None)
    text += ["## Use", *_use(to, _pipeline(policy.model), module, base=base if is_hub_id else _BASE, dtype=dtype)]
    if getattr(policy.model, "packaged", False):
        text.append(
            f"The base model is a playground model of Retouch ({base}). The pipelines of diffusers do not make its images as in "
            "training. `retouch sample RUN`, with the folder of the run, makes images with the trained weights."
        )
    if any(_BASE in part for part in text):
        text.append(f"`{_BASE}` is the model from which training started: {base}.")
    text += ["## Training settings", _settings(document, step), "`export.json` has the whole recipe."]
    metadata = _metadata(to, base if is_hub_id else None, policy.model)
    front = ModelCardData(**metadata).to_yaml()
    (to / "README.md").write_text(f"---\n{front}\n---\n\n" + "\n\n".join(text) + "\n", encoding="utf-8")


def _base_model(path: str) -> tuple[str, bool]:
    """The name of the base model, and whether it is an id on the Hugging Face Hub. For a local folder, its last part."""
    name = path.removeprefix(LIVE)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists():
        return name, True
    return (Path(name).name if Path(name).exists() else name), False


def _changed_parts(parts: PolicyParts) -> list[str]:
    """The parts of a model that a script had loaded whose frozen weights differ from those at the model's name; none if they are
    equal, or if there are no weights of this name on this machine."""
    policy = parts.recipe.policy
    path = getattr(policy.model, "path", None) or ""
    if not path.startswith(LIVE):
        return []
    try:
        named = _named_weights(policy.model_copy(update={"model": policy.model.model_copy(update={"path": path[len(LIVE) :]})}))
    except ValueError:  # there is nothing to compare with
        return []
    trained = {name.removeprefix("policy."): each for name, each in parts.weights().items() if not name.startswith("renderer")}
    return [name for name in sorted(named.keys() & trained.keys()) if named[name] != trained[name]]


@lru_cache(maxsize=1)
def _named_weights(policy: Any) -> dict[str, str]:
    """A hash of the frozen weights of each part of a policy, loaded into CPU memory; empty if they are not on this machine."""
    if not policy.model.find_weights()[1]:
        return {}
    model = policy.build_model(device=torch.device("cpu"))
    policy.make_trainable(model.module, seed=0)
    return frozen_hashes(model)


def _pipeline(model: Any) -> str | None:
    """The diffusers pipeline that makes images with the model as in training, by its name; None if there is none."""
    pipeline: str | None = model.pipeline
    return None if getattr(model, "packaged", False) else pipeline


def _metadata(to: Path, base: str | None, model: Any) -> dict[str, Any]:
    is_adapter = not any(path.is_dir() for path in to.iterdir())
    made: dict[str, Any] = {}
    if base is not None:
        made |= {"base_model": base, "base_model_relation": "adapter" if is_adapter else "finetune"}
        licence, name = next(((licence, name) for start, licence, name in _LICENCES if base.startswith(start)), ("", None))
        if licence:
            made["license"] = licence
        if name is not None:
            made |= {"license_name": name, "license_link": f"https://huggingface.co/{base}"}
    if _pipeline(model) is not None:
        edits = model.takes is not None and model.takes.images[0] > 0
        made |= {"library_name": "diffusers", "pipeline_tag": "image-to-image" if edits else "text-to-image"}
    elif is_adapter and (to / "adapter_config.json").is_file():
        made["library_name"] = "peft"
    made["tags"] = ["retouch", "reinforcement-learning", *(["lora"] if _has_lora(to) else [])]
    return made


def _has_lora(to: Path) -> bool:
    return any((to / name).is_file() for name in ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", COMFYUI_FILE))


def _what(to: Path) -> str:
    if (to / "ip_adapter.safetensors").is_file():
        return "An IP-Adapter"
    return "A LoRA" if _has_lora(to) else "The trained weights"


def _use(to: Path, pipeline: str | None, module: str, *, base: str, dtype: str | None) -> list[str]:
    """The instructions for loading each of the files. ``dtype``: the type of the weights in training; None if it is not known."""
    made = []
    imports, as_trained = ("", "") if dtype is None else ("import torch\n", f", torch_dtype=torch.{dtype}")
    if (to / "pytorch_lora_weights.safetensors").is_file() and pipeline is not None:
        made.append(
            _code(
                f"{imports}from diffusers import {pipeline}\n",
                f'pipe = {pipeline}.from_pretrained("{base}"{as_trained})',
                'pipe.load_lora_weights("FOLDER", weight_name="pytorch_lora_weights.safetensors")',
            )
        )
    elif (to / "adapter_model.safetensors").is_file():
        made.append(_code("from peft import PeftModel\n", 'model = PeftModel.from_pretrained(model, "FOLDER")'))
    if (to / "transformer").is_dir() and pipeline is not None:
        made.append(
            _code(
                f"{imports}from diffusers import {module}, {pipeline}\n",
                f'transformer = {module}.from_pretrained("FOLDER", subfolder="transformer"{as_trained})',
                f'pipe = {pipeline}.from_pretrained("{base}", transformer=transformer{as_trained})',
            )
        )
    if made:
        made.append("`FOLDER` is this folder or repository.")
    if (to / COMFYUI_FILE).is_file():
        made.append(f"ComfyUI: copy `{COMFYUI_FILE}` to `models/loras` and load it with the node *Load LoRA*.")
    if (to / "ip_adapter.safetensors").is_file():
        made.append("`ip_adapter.json` has the settings of the IP-Adapter, and whether diffusers' `load_ip_adapter` loads it.")
    if (to / "writer").is_dir():
        made.append("`writer` is a folder for `from_pretrained` of transformers.")
    return made


def _code(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def _scores(run: RunFolder, step: int, *, split: str) -> str | None:
    """The table of mean scores before training and after the newest evaluation, with the interval of the change if the scores of
    all tasks are stored; None if there are not two evaluations."""
    lines = {line["step"]: line for line in run.read_evals() if line["split"] == "heldout" and line["step"] <= step}
    if len(lines) < 2:
        return None
    before, after = lines[min(lines)], lines[max(lines)]
    scores_before, scores_after = (read_scores(run, at) for at in (min(lines), max(lines)))
    sources = read_sources(run, max(lines))
    first, last = before["table"]["all"], after["table"]["all"]
    better_low = set(after.get("lower_is_better", ()))
    left_out = "; tasks without a score are left out" if before.get("missing") or after.get("missing") else ""
    rows = [
        f"Means over {last['n']} {split_label(split)} tasks{left_out}.\n",
        f"| score | before | after {max(lines)} steps | change (95 % interval) |",
    ]
    rows.append("| --- | --- | --- | --- |")
    for column in [name for name in last if name != "n" and name in first]:
        change = _change(paired_change(scores_before.get(column, {}), scores_after.get(column, {}), sources))
        name = f"{column} (lower is better)" if column in better_low else column
        rows.append(f"| {name} | {first[column]:.4g} | {last[column]:.4g} | {change} |")
    return "\n".join(rows)


def _change(found: MeanEstimate) -> str:
    if not found.count:
        return ""
    return f"{found.mean:+.3g}" + (f" ({found.interval[0]:+.3g} to {found.interval[1]:+.3g})" if found.interval else "")


def _write_image(run: RunFolder, to: Path, *, step: int) -> bool:
    """Write the image of held-out samples; False if the run does not have samples of two steps."""
    if len([done for done in run.sample_steps() if done <= step]) < 2:
        return False
    before_and_after(run.root, rows=4, side=256, until=step).save(to)
    return True


def _settings(document: Mapping[str, Any], step: int) -> str:
    rows = ["| setting | value |", "| --- | --- |", f"| steps | {step} |"]
    for title, key in _SETTINGS:
        value: Any = document
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            rows.append(f"| {title} | {value} |")
    return "\n".join(rows)
