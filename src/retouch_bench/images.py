"""Generates the images of a benchmark with a run or recipe of Retouch or any diffusers pipeline, and keeps their files."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import torch
from PIL.Image import Image

from retouch.config import packaged
from retouch.config.imports import import_class
from retouch.core.random import generator
from retouch.data.images import SUFFIXES, load_image
from retouch.distributed.ranks import find_device, init_distributed_from_recipe, plan_placement
from retouch.inference.opening import open_policy, read_target
from retouch.inference.sampling import sample_tasks
from retouch.models.pretrained import fetch_weights
from retouch.policies.weights import WeightCopies
from retouch.recipe.recipe import load
from retouch.records.files import read_json, write_png
from retouch.records.folder import RunFolder, find_run
from retouch.records.libraries import silence_libraries
from retouch.run.build import PolicyParts
from retouch.types import Json, Task
from retouch_bench.lora import load_lora, lora_digest
from retouch_bench.suite import Suite, SuiteItem
from retouch_worlds.playground import playground_weights

_LONGEST = 180


@dataclass(frozen=True, slots=True, eq=False)
class ImageKey:
    """Identifies one image of a suite. ``number``: index of the item in the whole suite. ``sample``: index of the image among those
    of the item. ``turn``: from 0."""

    item: SuiteItem
    number: int
    sample: int
    turn: int

    @property
    def slot(self) -> int:
        """The index of the image among all images of the item, which is the key of its noise."""
        return self.sample * self.item.turns + self.turn


def image_keys(items: list[tuple[int, SuiteItem]], *, suite: Suite) -> list[ImageKey]:
    """Return the places of all images of the numbered items, sorted by turn."""
    return [
        ImageKey(item, number, sample, turn)
        for turn in range(max((item.turns for _, item in items), default=0))
        for number, item in items
        for sample in range(suite.images_per_item)
        if turn < item.turns
    ]


class ImageFolder:
    """A folder with one file for each image, named by the item's id: ``ID.png``.

    If items have several images, they are ``ID-0.png``, ``ID-1.png`` and so on; later turns add ``-turn2``, ``-turn3``. Characters
    that file names cannot contain are percent-encoded (``/`` is ``%2F``); a longer name than 180 characters is replaced by its
    SHA-256. Folders of other programs may also contain ``.jpg``, ``.jpeg`` and ``.webp`` files, and subfolders if the id contains
    slashes.
    """

    def __init__(self, root: Path, *, suite: Suite) -> None:
        self.root = root
        self._several = suite.images_per_item > 1
        self._reasons: dict[Path, str] = {}

    def path(self, place: ImageKey) -> Path:
        """Return the path to which the image is written."""
        return self.root / f"{_file_name(place.item.id)}{self._ending(place)}.png"

    def find(self, place: ImageKey) -> Path | None:
        """Return the path of the existing image; None if there is none."""
        name = place.item.id
        # Only a relative path that does not leave the folder.
        is_plain = "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts
        stems = [_file_name(name), *([name] if is_plain else [])]
        paths = (self.root / f"{stem}{self._ending(place)}{suffix}" for stem in stems for suffix in SUFFIXES)
        return next((path for path in paths if path.is_file()), None)

    def read(self, place: ImageKey) -> Image:
        """Load the image. Raises ValueError if there is none, with the reason if it is known, or if it cannot be read."""
        path = self.find(place)
        if path is None:
            raise ValueError(self._reasons.get(self.path(place), f"no image {self.path(place).name} in {self.root}"))
        return load_image(path)

    def explain(self, place: ImageKey, reason: str) -> None:
        """Say why there is no image; ``read`` raises a ValueError with this reason."""
        self._reasons[self.path(place)] = reason

    def write(self, place: ImageKey, image: Image) -> None:
        """Write the image atomically: a process that is killed leaves a complete file or none."""
        path = self.path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_png(path, image)

    def _ending(self, place: ImageKey) -> str:
        sample = f"-{place.sample}" if self._several else ""
        return sample + (f"-turn{place.turn + 1}" if place.turn else "")


def _file_name(identity: str) -> str:
    name = quote(identity, safe=" ()+,=@")
    name = f"%{ord('.'):02X}{name[1:]}" if name.startswith(".") else name
    return name if len(name) <= _LONGEST else hashlib.sha256(identity.encode()).hexdigest()


_TAKES_SEVERAL = (  # a list of images is one set of sources; other pipelines take one image, or a batch of them
    "Flux2KleinKVPipeline",
    "Flux2KleinPipeline",
    "Flux2Pipeline",
    "QwenImage21Pipeline",
    "QwenImageEditPlusPipeline",
)
_PLAYGROUND = ("retouch_worlds.models.family:PlaygroundModel", "retouch_worlds.models.family:PlaygroundTextToImage")


class ImageGenerator(Protocol):
    """Generates images for tasks. ``identity``: the model and its settings, as JSON. ``batch``: images generated at once. ``kind``:
    the model in messages. ``most_sources``: the number of source images that a task can have."""

    identity: dict[str, Json]
    batch: int
    kind: str
    most_sources: int

    def __call__(self, places: Sequence[ImageKey], tasks: Sequence[Task], *, seed: int) -> Iterator[Image]:
        """Yield an image for each task, in order. All places have the same slot. The noise depends only on seed, item and slot."""
        ...


class PolicyGenerator:
    """Generates images with a policy of Retouch, as `retouch sample` does."""

    def __init__(self, parts: Any, identity: dict[str, Json]) -> None:
        self._parts = parts
        self.identity = identity
        self.batch: int = parts.recipe.eval.batch
        recipe = parts.recipe
        takes = recipe.image_model.takes if recipe.renderer is None or recipe.renderer.uses_sources else None
        self.kind: str = recipe.image_model.kind
        self.most_sources: int = sys.maxsize if takes is None else takes.images[1]

    def __call__(self, places: Sequence[ImageKey], tasks: Sequence[Task], *, seed: int) -> Iterator[Image]:
        numbers, slot = [place.number for place in places], places[0].slot
        yield from (made.image for made in sample_tasks(self._parts, tasks, seed, numbers=numbers, slot=slot))


class PipelineGenerator:
    """Generates images with a diffusers pipeline, one at a time. ``call``: further arguments of each call. Raises ValueError if the
    suite edits images and the pipeline does not, or if the pipeline has no argument of this name."""

    batch = 1

    def __init__(self, pipeline: Any, identity: dict[str, Json], *, call: Mapping[str, Any], suite: Suite) -> None:
        self._pipeline = pipeline
        self._call = dict(call)
        self.identity = identity
        self._known = inspect.signature(pipeline.__call__).parameters
        self.kind = kind = type(pipeline).__name__
        self.most_sources = sys.maxsize if kind in _TAKES_SEVERAL else 1
        unknown = [name for name in call if name not in self._known]
        if unknown:
            raise ValueError(f"--call {unknown[0]}: {kind} takes no such argument; it takes {', '.join(self._known)}")
        if suite.task == "editing" and "image" not in self._known:
            raise ValueError(f"{suite.name} edits images, and {kind} takes no image; name an editing model")
        if hasattr(pipeline, "set_progress_bar_config"):
            pipeline.set_progress_bar_config(disable=True)

    def __call__(self, places: Sequence[ImageKey], tasks: Sequence[Task], *, seed: int) -> Iterator[Image]:
        for place, task in zip(places, tasks, strict=True):
            noise = generator(seed, "benchmark", place.number, place.slot)
            given: dict[str, Any] = {"prompt": task.instruction, "generator": noise, **self._call}
            if task.images:
                given["image"] = task.images[0] if len(task.images) == 1 else list(task.images)
            if task.mask is not None and "mask_image" in self._known:
                given["mask_image"] = task.mask
            yield self._pipeline(**given).images[0].convert("RGB")


def open_generator(model: Any, *, lora: str | Path | None, call: Mapping[str, Any], device: str, suite: Suite) -> ImageGenerator:
    """Open ``model``: a run (its folder, or its name in the folder ``runs``), a recipe, the folder or Hub id of a pipeline, or a
    loaded pipeline. Raises ValueError if there is no such model, or if it cannot generate the images of the suite."""
    if not isinstance(model, str | Path):
        identity: dict[str, Json] = {"model": f"a loaded {type(model).__name__}", "call": dict(call)}
        if lora is not None:
            load_lora(model, lora)
            identity["lora"] = lora_digest(lora)
        return PipelineGenerator(model, identity, call=call, suite=suite)
    from diffusers import DiffusionPipeline

    name = str(model)
    ours = is_ours(name)
    if ours and (lora is not None or call):
        raise ValueError(f"{name} is a run or recipe of Retouch, which has its own weights and settings; remove --lora and --call")
    silence_libraries()
    if ours:
        recipe, folder = read_target(name, ())
        takes = recipe.policy.model.takes
        if suite.task == "editing" and not recipe.policy.is_autoregressive and takes is not None and takes.images[1] == 0:
            raise ValueError(f"{suite.name} edits images, and the model of {name} takes no image; name a run of an editing model")
        parts, step = open_policy(recipe, folder)
        return PolicyGenerator(parts, {"model": f"{recipe.name}, step {step}", "recipe": dict(recipe.document()), "step": step})
    place = find_device(device)
    weights = playground_weights() if name == "playground" else fetch_weights(name)
    if not (weights / "model_index.json").is_file():
        raise ValueError(
            f"{name} is neither a run of Retouch nor a diffusers pipeline: it has no recipe.json and no model_index.json"
        )
    if (weights / "adapter.json").is_file():
        return _playground_maker(weights, {"model": name, "call": dict(call)}, lora=lora, call=call, device=device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    pipeline = DiffusionPipeline.from_pretrained(weights, dtype=dtype, local_files_only=True).to(place)
    identity = {"model": name, "call": dict(call), "dtype": str(dtype)}
    if lora is not None:
        load_lora(pipeline, lora)
        identity["lora"] = lora_digest(lora)
    return PipelineGenerator(pipeline, identity, call=call, suite=suite)


def is_ours(name: str) -> bool:
    """Whether ``name`` is the folder of a run, the name of a run in the folder ``runs``, or a recipe."""
    if RunFolder(find_run(name)).recipe.is_file() or name.endswith(packaged.SUFFIXES):
        return True
    return not Path(name).is_dir() and name != "playground" and packaged.is_recipe(name)


def _playground_maker(
    folder: Path, identity: dict[str, Json], *, lora: str | Path | None, call: Mapping[str, Any], device: str
) -> ImageGenerator:
    """Open a playground model, with a LoRA that diffusers loads into its transformer. The pipeline class would resize every source
    image to a megapixel, but playground models edit images of 24 x 24 px. So the model family runs the model, with the settings of
    the quickstart recipe."""
    import diffusers

    kind = read_json(folder / "model_index.json")["_class_name"]
    sections: list[Any] = [import_class(path) for path in _PLAYGROUND]
    section = next((found for found in sections if found.pipeline == kind), None)
    if section is None or call.keys() - {"num_inference_steps"}:
        raise ValueError(
            f"{folder}: a playground model must be an editor or text-to-image model, and takes only --call num_inference_steps=N"
        )
    recipe = load("quickstart", [f"device={device}", *(f"eval.num_steps={steps}" for steps in call.values())])
    ranks = init_distributed_from_recipe(recipe)
    model = section(path=str(folder)).build(device=ranks.device)
    if lora is not None:
        others = {name for name in inspect.signature(getattr(diffusers, kind)).parameters if name != "transformer"}
        pipeline = getattr(diffusers, kind)(transformer=model.module, **dict.fromkeys(others))
        load_lora(pipeline, lora)
        model.module = pipeline.transformer
        identity["lora"] = lora_digest(lora)
    placement, copies = plan_placement(recipe, ranks), WeightCopies(model.module)
    parts = PolicyParts(recipe=recipe, ranks=ranks, placement=placement, model=model, image_model=model, copies=copies)
    return PolicyGenerator(parts, identity)
