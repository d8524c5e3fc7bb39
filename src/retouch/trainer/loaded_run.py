"""``retouch.load_run`` opens the results of a run from its folder: the trained policy, a diffusers pipeline, and tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import diffusers
import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor

from retouch.config import consent, wings
from retouch.config.imports import module_of
from retouch.config.section import LIVE, live_objects
from retouch.data.images import EncodedImage, load_image, load_mask
from retouch.data.sources.hub import encoded_image
from retouch.distributed.ranks import scoring_device
from retouch.inference.opening import Writer, WriterOutput, open_policy
from retouch.inference.sampling import SampleContext, sample_tasks
from retouch.models.base import DiffusersModel, ImageModel, LanguageModel
from retouch.models.loaded import LoadedLanguageModel
from retouch.models.parts import evaluating
from retouch.models.pipeline import Guided
from retouch.models.pretrained import fetch_weights
from retouch.models.train import IpAdapter
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.denoising import DenoisingPolicy, DenoisingTrajectory
from retouch.policies.rollout import DenoisingRollout, ODETransition, SDETransition, Transition
from retouch.policies.weights import WeightCopies
from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder, Summary
from retouch.records.libraries import silence_libraries
from retouch.renderers.base import LatentRenderer
from retouch.run.build import PolicyParts
from retouch.run.recorder import before_and_after
from retouch.trainer.arguments import model_section, require_pair
from retouch.types import Batch, Task

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

SourceImage: TypeAlias = Image | str | Path | bytes
SourceImages: TypeAlias = SourceImage | Sequence[SourceImage | None] | None
_KEYS = {"model": "policy.model", "renderer": "renderer.model"}
"""Arguments of ``load_run``, and the keys of the recipe that they stand for."""


def load_run(
    folder: str | Path,
    *,
    model: Any = None,
    processing_class: Any = None,
    renderer: Any = None,
    device: str | None = None,
    allow_imports: Iterable[str] = (),
) -> LoadedRun:
    """Open the run in this folder, with the weights of its newest checkpoint (their running average, if the run keeps one).

    ``model``, ``processing_class``, ``renderer``: for a run that was given loaded models, the same models; by default they are
    loaded from their original folder or repository. ``device``: by default the device of the run. ``allow_imports``: modules
    outside Retouch that the recipe may import. Nothing is loaded before it is used. Raises ValueError if this is not the folder of
    a run.

    Example::

        >>> run = retouch.load_run(folder, model=pipe, device="cpu")
        >>> run.step, len(run.metrics), len(run.policy.sample(["blue"], seed=1))
        (1, 1, 1)
    """
    silence_libraries()
    files = RunFolder(Path(folder))
    files.require_plain()
    document = files.read_recipe()["recipe"]
    overrides = [] if device is None else [f"device={json.dumps(device)}"]
    objects: dict[str, Any] = {}
    for argument, given, processor in (("model", model, processing_class), ("renderer", renderer, None)):
        key = _KEYS[argument]
        path = _path_at(document, key)
        if path is None or not path.startswith(LIVE):
            if given is not None:
                raise ValueError(f"{argument}: the run loads {path or 'its model'} itself; omit the argument")
        elif given is not None:
            objects[path] = given if hasattr(given, "components") else LoadedLanguageModel(given, processor)
        elif Path(source := path.removeprefix(LIVE)).is_dir() or "/" in source:
            overrides.append(f"{key}.path={json.dumps(source)}")
    with consent.allowing(consent.module_names(allow_imports)):
        return LoadedRun(files, parse(document, overrides, allow_imports=allow_imports), objects)


def _path_at(document: Mapping[str, Any], key: str) -> str | None:
    value = value_at(document, f"{key}.path")
    return value if isinstance(value, str) else None


@dataclass(eq=False, repr=False)
class LoadedRun:
    """A run that was opened from its folder by ``load_run``.

    ``recipe``: the run as a recipe; ``recipe.document()`` is its JSON.
    """

    _files: RunFolder
    recipe: Recipe
    _objects: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._files.root

    @property
    def step(self) -> int:
        """The step of the newest checkpoint. Raises ValueError if there is none."""
        return self._parts[1]

    @property
    def summary(self) -> Summary | None:
        """The comparison of held-out scores before and after; None before the run has ended."""
        return self._files.read_summary()

    @property
    def policy(self) -> LoadedPolicy:
        """The trained policy."""
        return LoadedPolicy(self._parts[0])

    def pipeline(self) -> Any:
        """A diffusers pipeline with the trained weights, ready to call; it makes the same images as the trainer.

        A LoRA is attached to the transformer, as by ``pipe.load_lora_weights``. Raises ValueError if diffusers has no pipeline for
        the policy.

        Example::

            >>> run.pipeline()("blue", num_inference_steps=2, height=32, width=32, max_sequence_length=20).images[0].size
            (32, 32)
        """
        section = self.recipe.policy.model
        if isinstance(section, LanguageModel):
            raise ValueError(
                "the policy of this run is a language model, not a pipeline; use run.policy.generate(...) or run.policy.sample(...)"
            )
        if getattr(section, "packaged", False):
            raise ValueError("a built-in model of the playground is not opened as a pipeline; use run.policy.sample(...)")
        if self.recipe.policy.base is not None:
            raise ValueError(
                "the base of this run is quantised, and a pipeline has the whole weights; use run.policy.sample(...), or export "
                "the LoRA and load it into a pipeline"
            )
        if not isinstance(section, DiffusersModel) or isinstance(self.recipe.policy.train, IpAdapter):
            raise ValueError("diffusers has no pipeline for this policy; use run.policy.sample(...), or `retouch export`")
        if section.path not in self._objects and not section.path.startswith(LIVE):
            # Let the policy use the models of the pipeline, so that the weights are in memory only once.
            kind: Any = getattr(diffusers, section.pipeline)
            path = LIVE + section.path
            self._objects[path] = kind.from_pretrained(fetch_weights(section.path), dtype=getattr(torch, section.dtype))
            document = self.recipe.document()
            imported = [module_of(name) for _, name in consent.classes_named(document)]  # allowed when the run was opened
            self.recipe = parse(document, [f"policy.model.path={json.dumps(path)}"], allow_imports=imported)
            vars(self).pop("_parts", None)
        copies = self._parts[0].copies
        for name, average in copies.copies.get("average", {}).items():
            copies.parameters[name].data.copy_(average)
        return self._objects[self.recipe.policy.model.source]

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per step: ``step``, ``phase``, and every metric."""
        return _frame(self._files.read_metrics())

    @property
    def evaluations(self) -> pd.DataFrame:
        """The held-out evaluations: ``step``, ``split``, ``row`` ("all", "tag=value"), ``n``, and the mean of every column."""
        lines = self._files.read_evals()
        return _frame(
            [
                {"step": line["step"], "split": line["split"], "row": row, **means}
                for line in lines
                for row, means in line["table"].items()
            ]
        )

    @property
    def ledger(self) -> pd.DataFrame:
        """One row per scored sample: ``split``, ``step``, ``group``, ``slot``, ``task``, ``image`` (SHA-256), ``completion``,
        ``judge``, ``seconds``, ``at`` (seconds since 1970), and every score. Raises ValueError if the run has scored nothing.
        """
        rows = [asdict(sample) for sample in wings.load("part.ledger").open(self.folder).samples]
        scores = [row.pop("scores") for row in rows]
        return _frame([{**row, **given} for row, given in zip(rows, scores, strict=True)])

    def samples(self) -> Image:
        """Held-out images before and after training, with prompts and rewards: source (for editors), before, after."""
        return before_and_after(self.folder)

    @cached_property
    def _parts(self) -> tuple[PolicyParts, int]:
        for argument, key in _KEYS.items():
            path = _path_at(self.recipe.document(), key)
            if path is not None and path.startswith(LIVE) and path not in self._objects:
                raise ValueError(
                    f"{argument}: this run was given a loaded model; give it to load_run too: load_run(folder, {argument}=...)"
                )
        with live_objects(self._objects):
            return open_policy(self.recipe, self._files)


@dataclass(eq=False, repr=False)
class LoadedPolicy:
    """The trained policy of a run."""

    _parts: PolicyParts

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        images: SourceImages = None,
        masks: SourceImages = None,
        references: SourceImages = None,
        context: SampleContext | None = None,
        seed: int = 0,
    ) -> list[Image]:
        """Make an image for each prompt, like ``retouch sample``. ``images``: the source image of each prompt, for editors: PIL
        images, or the paths or bytes of files; None for a prompt without one. They are converted as in training: upright, RGB,
        transparent parts over white. ``masks``, for inpainting models: 255 where an image should change, 0 where it should stay.
        ``references``: the reference images that an IP-Adapter reads. ``context``: "reference" also shows each reference to an
        inpainting model, above the source image on one canvas, from which the result is cropped.

        Raises ValueError if there is no prompt, if there are not as many images of a kind as prompts, if an image cannot be read,
        if the model or the context needs an image that is missing, or if the policy makes no usable image.

        Example::

            >>> [image.size for image in run.policy.sample(["blue", "a red circle"])]
            [(32, 32), (32, 32)]
        """
        tasks = _tasks(prompts, images, masks=masks, references=references)
        return [sample.image for sample in sample_tasks(self._parts, tasks, seed, context=context)]

    def generate(self, prompts: str | Sequence[str], *, images: SourceImages = None) -> list[WriterOutput]:
        """Generate the greedy completion of each prompt; the arguments are as in ``sample``. Raises ValueError in the same cases,
        and if the policy is not a language model."""
        policy = self._parts.policy(self._parts.recipe.rollout)
        if not isinstance(policy, AutoregressivePolicy):
            raise ValueError("the policy is an image model and generates no text; use sample(...)")
        tasks = _tasks(prompts, images)
        return Writer(policy, batch=self._parts.recipe.eval.batch).many(
            [task.instruction for task in tasks], [task.images for task in tasks]
        )


def _tasks(
    prompts: str | Sequence[str], images: SourceImages, *, masks: SourceImages = None, references: SourceImages = None
) -> list[Task]:
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise ValueError("prompts: the list is empty; give at least one prompt")
    sources = _opened("images", images, len(prompts), load_image)
    shapes = _opened("masks", masks, len(prompts), load_mask)
    shown = _opened("references", references, len(prompts), load_image)
    for row, (source, mask) in enumerate(zip(sources, shapes, strict=True)):
        if source is not None and mask is not None and source.size != mask.size:
            raise ValueError(f"masks[{row}]: its size is {mask.size}, but that of its image {source.size}; they must be equal")
    return [
        Task(str(row), text, () if source is None else (source,), mask=mask, reference=reference)
        for row, (text, source, mask, reference) in enumerate(zip(prompts, sources, shapes, shown, strict=True))
    ]


def _opened(argument: str, given: SourceImages, count: int, load: Callable[[EncodedImage], Image]) -> list[Image | None]:
    """The images of an argument of ``sample``, one for each of ``count`` prompts. Raises ValueError with the argument's name."""
    values = [None] * count if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if len(values) != count:
        raise ValueError(f"{argument}: {len(values)} for {count} prompts; give one for each, or None where there is none")
    opened: list[Image | None] = []
    for row, value in enumerate(values):
        try:
            opened.append(None if value is None else load(encoded_image(value)))
        except ValueError as error:
            raise ValueError(f"{argument}[{row}]: {error}") from error
    return opened


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd  # comes with datasets

    return pd.DataFrame(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroups:
    """The result of ``sample``. Row ``i`` belongs to ``prompts[i // group_size]``.

    ``images``: one per row; None if the latents of the row were not finite. ``trajectory``: what an objective trains on.
    """

    prompts: Sequence[str]
    group_size: int
    images: list[Image | None]
    trajectory: DenoisingTrajectory

    @property
    def log_probs(self) -> Float[Tensor, "b t"]:
        """The log-probability of each stochastic step under the policy that sampled it, NaN if there is none."""
        return self.trajectory.log_probs

    @property
    def states(self) -> Float[Tensor, "b t_plus_1 ..."]:
        """The latents before each stochastic step and after the last one, fp32."""
        return self.trajectory.latents

    @property
    def sigmas(self) -> Float[Tensor, " n_plus_1"]:
        """The noise levels of the whole schedule, from 1 to 0."""
        return self.trajectory.sigmas

    def __len__(self) -> int:
        return len(self.images)


def sample(
    pipe: Any,
    prompts: Sequence[str] | str,
    *,
    group_size: int = 8,
    sde: float | Transition | None = 0.7,
    num_steps: int = 10,
    guidance_scale: float = 1.0,
    images: Sequence[Image] | None = None,
    size: tuple[int, int] | int | None = None,
    seed: int = 0,
    batch: int = 8,
    device: torch.device | str | None = None,
    **rollout: Any,
) -> SampledGroups:
    """Sample ``group_size`` images of each prompt as a policy does in training, with the log-probability of every step.

    ``pipe``: a loaded diffusers pipeline, a folder, a Hugging Face id, or a section such as ``retouch.models.SD3(path=...)``. Its
    models are frozen; a loaded pipeline samples with its current weights, including its LoRA. ``sde``: the noise level of
    Flow-GRPO's stochastic step, another transition such as ``retouch.CPSTransition(noise_level=0.5)``, or None to sample
    deterministically. ``images``: the source image of each prompt, for editors. ``size``: (height, width) in px, or one number for
    squares. ``batch``: images sampled at once, at least one group. ``device``: by default the device of the pipeline. ``rollout``:
    other keys of ``rollout`` in a recipe: ``window``, ``reduction``, ``shared_noise``. The same ``seed`` makes the same images.

    Raises ValueError for a model of an unsupported family, and for wrong values.

    Source: denoising as a chain of actions, DDPO (arXiv 2305.13301) and Flow-GRPO (arXiv 2505.05470).

    Example::

        >>> samples = retouch.sample(pipe, ["a red circle", "blue"], group_size=2, num_steps=4, size=32)
        >>> len(samples.images), samples.log_probs.shape, samples.states.shape
        (4, torch.Size([4, 3]), torch.Size([4, 4, 16, 8, 8]))
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or group_size < 1:
        raise ValueError(
            f"{len(prompts)} prompts, group_size {group_size}: give at least one prompt, and a group_size of at least 1"
        )
    if images is not None and len(images) != len(prompts):
        raise ValueError(f"images: {len(images)} for {len(prompts)} prompts; give one source image for each")
    placed = torch.device(device or getattr(pipe, "device", None) or scoring_device())
    section, objects = model_section(pipe, size=require_pair(size), dtype=None, gpu=placed.type != "cpu", key="pipe")
    if not isinstance(section, ImageModel):
        raise ValueError("pipe: a language model makes no images; give a diffusers pipeline")
    transition = ODETransition() if sde is None else sde if isinstance(sde, Transition) else SDETransition(noise_level=float(sde))
    sampling = DenoisingRollout(num_steps=num_steps, transition=transition, guidance_scale=float(guidance_scale), **rollout)
    if problems := list(sampling.problems("rollout")):
        raise ValueError("\n".join(problems))
    with live_objects(objects):
        model = section.build(device=placed)
    tasks = [Task(str(row), prompt, () if images is None else (images[row],)) for row, prompt in enumerate(prompts)]
    made, trajectories = list[Any](), list[Any]()
    with evaluating(model.module):
        guided = Guided(model, sampling.guidance_scale) if sampling.guidance_scale > 1 else model
        copies = WeightCopies(model.module)
        policy = DenoisingPolicy(guided, sampling=sampling, eval_steps=sampling.num_steps, microbatch=1, copies=copies)
        at_once = max(1, batch // group_size)
        for first in range(0, len(tasks), at_once):
            some = tuple(tasks[first : first + at_once])
            group = tuple(row for row in range(len(some)) for _ in range(group_size))
            ids, slot = tuple(range(first, first + len(some))), tuple(range(group_size)) * len(some)
            trajectories.append(policy.rollout(Batch(seed=seed, step=0, tasks=some, group_ids=ids, group=group, slot=slot)))
            made += LatentRenderer(model)([some[row] for row in group], trajectories[-1])
    return SampledGroups(prompts=prompts, group_size=group_size, images=made, trajectory=type(trajectories[0]).concat(trajectories))
