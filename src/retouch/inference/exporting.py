"""`retouch export`: the trained weights of a run in the formats of diffusers, PEFT and ComfyUI.

A LoRA is written as ``pytorch_lora_weights.safetensors`` (for a pipeline's ``load_lora_weights``), ``adapter_model.safetensors``
with ``adapter_config.json`` (for ``PeftModel.from_pretrained``), and ``comfyui_lora.safetensors`` (if ComfyUI supports the model
family, see ``models/lora.py``). An IP-Adapter is written as ``ip_adapter.safetensors``, which a Flux pipeline can
load with ``load_ip_adapter`` if the adapter has the required form (see ``models/ip_adapter.py``), and ``ip_adapter.json``
with its settings. Full weights are written to a folder ``transformer``, those of a writer to ``writer`` (for ``from_pretrained``).
``README.md`` is the model card, with the metadata of the Hugging Face Hub.

It also pushes such exports to the Hub while a run trains, and converts published IP-Adapters (`retouch tools convert`).
"""

import logging
import re
import shutil
import stat
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import safetensors.torch
import torch
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor

from retouch.config.section import LIVE
from retouch.core.intervals import paired_change
from retouch.inference.opening import open_policy, read_target
from retouch.models.base import COMFYUI_FILE
from retouch.models.ip_adapter import FILE
from retouch.models.lora import part_of_pipeline
from retouch.models.parts import frozen_hashes, load_restricted
from retouch.models.train import ExportFiles, Format
from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe
from retouch.records import files
from retouch.records.folder import RunFolder, split_label
from retouch.records.libraries import silence_libraries, versions
from retouch.run.build import Assembly, PolicyParts
from retouch.run.hooks import Hook, StepResult
from retouch.run.recorder import before_and_after
from retouch.run.step import ScoredRollout

Which = Literal["average", "current"]
IMAGE = "before-and-after.png"
TEXT_TO_IMAGE = "text_to_image"
"""The folder of the image model's weights, if it trained together with the writer."""
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


def export_target(target: str | Path, *, to: Path, which: Which | None = None, format: Format = "all") -> list[Path]:
    """Write the weights of a run's newest checkpoint to the folder ``to``, and return the files.

    ``which``: the weights, ``average`` (which evaluation and `retouch sample` use; the default if the run has an average) or
    ``current``. ``format``: the format of a LoRA. ``export.json`` contains the recipe and the step. Data and reward are not loaded,
    so they may be objects of the script that trained the run. Raises ValueError if ``to`` is a file or not empty, if the target was
    never trained, if there is no average, or if the model has no such format."""
    if to.exists() and not to.is_dir():
        raise ValueError(f"--to {to}: this is a file; name a new folder")
    if to.exists() and any(to.iterdir()):
        raise ValueError(f"--to {to}: the folder is not empty; name a new one")
    recipe, folder = read_target(str(target))
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
    policy, model = parts.recipe.policy, parts.recipe.policy.model
    if format != "all" and policy.train.lora is None:
        raise ValueError(f"--format {format}: this run trained no LoRA; export without --format")
    if (format == "diffusers" and model.pipeline is None) or (format == "comfyui" and model.comfyui is None):
        raise ValueError(f"--format {format}: a LoRA of {model.source} has no such format; choose peft or all")
    chosen = which or ("average" if "average" in parts.copies.copies else "current")
    to.mkdir(parents=True, exist_ok=True)
    with parts.copies.using("average") if chosen == "average" else nullcontext():
        folder = "writer" if policy.is_autoregressive else part_of_pipeline(parts.model.module)
        written = ExportFiles(folder=folder, pipeline=model.pipeline, comfyui=model.comfyui, format=format)
        policy.train.export(parts.model.module, to, written)
    if parts.painted is not None and parts.recipe.text_to_image is not None:
        image_model, module = parts.recipe.image_model, parts.image_model.module
        with parts.painted.using("average") if chosen == "average" else nullcontext():
            their_files = ExportFiles(folder=part_of_pipeline(module), pipeline=image_model.pipeline, comfyui=image_model.comfyui)
            (to / TEXT_TO_IMAGE).mkdir()
            parts.recipe.text_to_image.train.export(module, to / TEXT_TO_IMAGE, their_files)
    about = {"recipe": (recipe or parts.recipe).document(), "step": step, "weights": chosen, "versions": versions(to)}
    files.write_json(to / "export.json", about)
    write_card(parts, to, run or RunFolder(parts.recipe.folder), step=step)
    # safetensors creates its files for their owner only, whatever the umask; `export.json` has the mode that the umask allows.
    mode = stat.S_IMODE((to / "export.json").stat().st_mode)
    for path in to.rglob("*.safetensors"):
        path.chmod(mode)
    return sorted(path for path in to.rglob("*") if path.is_file())


def write_card(parts: PolicyParts, to: Path, run: RunFolder, *, step: int) -> None:
    """Write the ``README.md`` of the export in the folder ``to``, and the image of held-out samples if the run has samples."""
    policy, document = parts.recipe.policy, parts.recipe.document()
    split = parts.recipe.eval.split
    base, is_hub_id = _base_model(getattr(policy.model, "path", None) or policy.model.source)
    if changed := _changed_parts(parts):
        base, is_hub_id = f"a model like {base}, but with other weights ({', '.join(changed)})", False
    what = "An IP-Adapter" if (to / FILE).is_file() else "A LoRA" if _has_lora(to) else "The trained weights"
    text = [f"# {parts.recipe.name}", f"{what} for {base}, trained for {step} steps with rewards by Retouch."]
    if changed:
        text.append("With other base weights, it makes other images. Load the weights from which training started first.")
    if (table := _scores(run, step, split=split)) is not None:
        text += ["## Evaluation", table]
    if len([done for done in run.sample_steps() if done <= step]) >= 2:
        before_and_after(run.root, rows=4, side=256, until=step).save(to / IMAGE)
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
    settings = [(title, value_at(document, key)) for title, key in _SETTINGS]
    rows = [f"| {title} | {value} |" for title, value in [("steps", step), *settings] if value is not None]
    table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
    text += ["## Training settings", table, "`export.json` has the whole recipe."]
    metadata = _metadata(to, base if is_hub_id else None, policy.model)
    front = ModelCardData(**metadata).to_yaml()
    (to / "README.md").write_text(f"---\n{front}\n---\n\n" + "\n\n".join(text) + "\n", encoding="utf-8")


def _base_model(path: str) -> tuple[str, bool]:
    """The name of the base model, and whether it is an id on the Hugging Face Hub. For a local folder, its last part."""
    name = path.removeprefix(LIVE)
    if Path(name).exists():
        return Path(name).name, False
    return name, re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


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
    trained = {name.removeprefix("policy."): each for name, each in parts.base_hashes().items() if not name.startswith("renderer")}
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
    part = "unet" if (to / "unet").is_dir() else "transformer"
    if (to / part).is_dir() and pipeline is not None:
        made.append(
            _code(
                f"{imports}from diffusers import {module}, {pipeline}\n",
                f'{part} = {module}.from_pretrained("FOLDER", subfolder="{part}"{as_trained})',
                f'pipe = {pipeline}.from_pretrained("{base}", {part}={part}{as_trained})',
            )
        )
    if made:
        made.append("`FOLDER` is this folder or repository.")
    if (to / COMFYUI_FILE).is_file():
        made.append(f"ComfyUI: copy `{COMFYUI_FILE}` to `models/loras` and load it with the node *Load LoRA*.")
    if (to / FILE).is_file():
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
    scores_before, scores_after = (run.read_scores(at) for at in (min(lines), max(lines)))
    sources = run.read_sources(max(lines))
    first, last = before["table"]["all"], after["table"]["all"]
    better_low = set(after.get("lower_is_better", ()))
    left_out = "; tasks without a score are left out" if before.get("missing") or after.get("missing") else ""
    rows = [
        f"Means over {last['n']} {split_label(split)} tasks{left_out}.\n",
        f"| score | before | after {max(lines)} steps | change (95 % interval) |",
    ]
    rows.append("| --- | --- | --- | --- |")
    for column in [name for name in last if name != "n" and name in first]:
        found = paired_change(scores_before.get(column, {}), scores_after.get(column, {}), sources)
        change = f"{found.mean:+.3g}" if found.count else ""
        if found.count and found.interval:
            change += f" ({found.interval[0]:+.3g} to {found.interval[1]:+.3g})"
        name = f"{column} (lower is better)" if column in better_low else column
        rows.append(f"| {name} | {first[column]:.4g} | {last[column]:.4g} | {change} |")
    return "\n".join(rows)


log = logging.getLogger("retouch")

UNSENT: tuple[type[Exception], ...] = tuple(HfHubHTTPError.__bases__)
"""The errors of the operating system and of the Hub's HTTP client, whose package depends on the version of huggingface_hub."""
FAILED: tuple[type[Exception], ...] = (*UNSENT, ValueError)
"""``UNSENT``, and the error for a model card whose metadata the Hub refuses."""


def why_not_pushable() -> str | None:
    """The reason why this process cannot push; None if a push can be tried."""
    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if get_token() is None:
        return "there is no token for the Hugging Face Hub: set HF_TOKEN or run `hf auth login`"
    return None


def open_publisher(recipe: Recipe, folder: RunFolder, *, is_main: bool) -> "Publisher | None":
    """The publisher of a recipe with ``push`` on the main rank. None on other ranks, and if nothing can be pushed, which is logged.

    Creates the repository if it does not exist. Raises ValueError if this token may not write to the repository.
    """
    if recipe.push is None or not is_main:
        return None
    if (reason := why_not_pushable()) is not None:
        log.warning("push is off: %s", reason)
        return None
    api, repo = HfApi(), recipe.push.repo
    try:
        repo = _create_repo(api, repo, private=recipe.push.private, key="push.repo", or_else="train without it: --set push=null")
    except UNSENT as error:
        log.warning("the Hugging Face Hub does not answer (%s); the run will still try to push", error)
    return Publisher(recipe.push.every, repo, folder, api)


def push_folder(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload a folder to a repository, which is created if it does not exist; returns the address.

    Raises ValueError if there is no token, or if it may not write to the repository.
    """
    if (reason := why_not_pushable()) is not None:
        raise ValueError(reason)
    api = HfApi()
    repo = _create_repo(api, repo, private=private, key="repo", or_else="save_pretrained to a folder")
    return str(api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message))


def _create_repo(api: HfApi, repo: str, *, private: bool, key: str, or_else: str) -> str:
    """Create the repository if it does not exist, and return its full name, USER/NAME."""
    try:
        return api.create_repo(repo, private=private, exist_ok=True).repo_id
    except HfHubHTTPError as error:
        raise ValueError(
            f"{key} {repo}: the Hugging Face Hub refused it ({error}); name a repository that this token may write to, or {or_else}"
        ) from error


@dataclass(eq=False)
class Publisher(Hook):
    """Uploads one export at a time; ``close`` waits for running uploads."""

    every: int
    repo: str
    folder: RunFolder
    api: HfApi
    _uploads: list[Future[None]] = field(default_factory=list, init=False)
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, thread_name_prefix="push"), init=False)

    station: ClassVar[Literal["saved"]] = "saved"

    def attach(self, parts: Assembly) -> None:
        self._parts = parts

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        if step.step < step.steps and self.every and step.step % self.every == 0:
            self._push(step.step, last=False)

    def ended(self, step: int, *, finished: bool) -> None:
        if finished:
            self._push(step, last=True)

    def _push(self, step: int, *, last: bool) -> None:
        """Export the weights and start the upload. ``last``: this is the last step of the run."""
        revision = f"step-{step:06d}"
        to = self.folder.root / "push" / revision
        shutil.rmtree(to, ignore_errors=True)  # left over from a killed run
        write_export(self._parts, to, step=step)
        self._uploads.append(self._thread.submit(self._upload, to, [revision, "main"] if last else [revision]))

    def close(self) -> None:
        """Wait until everything is uploaded."""
        if any(not future.done() for future in self._uploads):
            log.info("waiting for the last push to the Hugging Face Hub")
        self._thread.shutdown()
        for future in self._uploads:
            future.result()

    def _upload(self, folder: Path, revisions: list[str]) -> None:
        repo = self.repo
        for revision in revisions:
            try:
                if revision != "main":
                    self.api.create_branch(repo, branch=revision, exist_ok=True)
                message = f"{self.folder.name}, {folder.name}"
                self.api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=message)
            except FAILED as error:
                log.warning("could not push to %s at %s: %s", repo, revision, error)
                log.warning(
                    "the weights stay on this machine; upload them with: hf upload %s %s --revision %s", repo, folder, revision
                )
                return
            log.info("pushed %s to %s at %s", folder.name, repo, revision)
        shutil.rmtree(folder)


# The keys of the projection and of the attention blocks: in the files of the IP-Adapter trainer, and in calligrapher.bin.
_LAYOUTS = (("image_proj", "ip_adapter"), ("image_proj_mlp", "attn_adapter"))
_QFORMER = "image_proj_qformer"
_PROJECTION = re.compile(r"(proj\.\d+|proj|norm)\.(weight|bias)")
_OF_QFORMER = re.compile(
    r"query_embeds|(id_proj\.[02]|cross_attn\.out_proj|cross_attn_norm|norm)\.(weight|bias)|cross_attn\.in_proj_(weight|bias)"
)
_ATTENTION = re.compile(r"(?:.*\.)?(\d+)\.(to_[kv]_ip)(?:\.0)?\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """A converted IP-Adapter. ``file``: the file that was written. ``tokens``, ``projection``: the values for ``policy.train``.
    ``blocks``: the number of blocks with attention weights."""

    file: Path
    tokens: int
    projection: str
    blocks: int

    def __str__(self) -> str:
        about = f"{self.tokens} tokens, projection '{self.projection}', {self.blocks} blocks"
        mlp = "; projection 'mlp' uses only its MLP, as in the trainer that wrote it" if self.projection == "qformer" else ""
        return f"{self.file}: {about}. Use it with policy.train.init_from{mlp}"


def convert_adapter(source: str | Path, *, to: str | Path) -> ConvertedAdapter:
    """Write ``ip_adapter.safetensors`` with the weights of a ``.bin`` file into the folder ``to``.

    Raises ValueError if the file is missing, contains other objects than tensors, or is not such an adapter.
    """
    file, folder = Path(source), Path(to)
    if not file.is_file():
        raise ValueError(f"{source}: no such file")
    if (folder / FILE).exists():
        raise ValueError(f"{folder / FILE} exists; choose another folder")
    stored = load_restricted(file)
    parts = next((keys for keys in _LAYOUTS if isinstance(stored, Mapping) and set(keys) <= stored.keys()), None)
    if parts is None:
        expected = " or ".join(" and ".join(keys) for keys in _LAYOUTS)
        raise ValueError(f"{file}: not an IP-Adapter; it should have {expected}")
    projection, attention = (_tensors(file, part, stored[part]) for part in parts)
    qformer = _tensors(file, _QFORMER, stored[_QFORMER]) if _QFORMER in stored else {}
    if wrong := [name for name in qformer if not _OF_QFORMER.fullmatch(name)]:
        raise ValueError(f"{file}: its Q-Former has {wrong[0]!r}, which Calligrapher's does not have; it cannot be used here")
    prefix = "image_proj.mlp." if qformer else "image_proj."
    named = {f"{prefix}{name}": tensor for name, tensor in projection.items()}
    # The key and value weights of the blocks, renumbered from 0 in order.
    found = {match.groups(): tensor for name, tensor in attention.items() if (match := _ATTENTION.fullmatch(name))}
    order = {number: place for place, number in enumerate(sorted({int(number) for number, _, _ in found}))}
    named |= {f"ip_adapter.{order[int(number)]}.{what}.{kind}": tensor for (number, what, kind), tensor in found.items()}
    wanted = [f"ip_adapter.{place}.{what}.weight" for place in order.values() for what in ("to_k_ip", "to_v_ip")]
    if not order or (lacking := [name for name in wanted if name not in named]):
        missing = lacking[0] if order else "to_k_ip and to_v_ip"
        raise ValueError(f"{file}: its attention has no {missing}; its names begin with {', '.join(list(attention)[:3])}")
    named |= {f"image_proj.qformer.{name}": tensor for name, tensor in qformer.items()}
    if wrong := [name for name in projection if not _PROJECTION.fullmatch(name)]:
        raise ValueError(
            f"{file}: its projection has {wrong[0]!r}, so it is neither a linear layer nor an MLP; it cannot be used here"
        )
    last = projection.get("proj.weight", projection.get("proj.2.weight"))
    if last is None or "norm.weight" not in projection:
        raise ValueError(f"{file}: its projection has no proj.weight or proj.2.weight, or no norm.weight")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / FILE, safetensors.torch.save(named))
    return ConvertedAdapter(
        folder / FILE,
        tokens=len(last) // len(projection["norm.weight"]),
        projection="qformer" if qformer else "linear" if "proj.weight" in projection else "mlp",
        blocks=len({name.split(".")[1] for name in named if name.startswith("ip_adapter.")}),
    )


def _tensors(file: Path, part: str, found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping) or not found or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{file}: {part} should be a map of tensors")
    return {str(name): tensor.detach().to(torch.float32).contiguous() for name, tensor in found.items()}
