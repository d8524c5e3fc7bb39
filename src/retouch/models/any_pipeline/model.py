"""Any diffusers pipeline as a flow-matching model: its own ``__call__``, suspended inside its denoising loop, is the velocity.

A pipeline encodes prompts and images, packs latents and combines the branches of guidance in code of its own. ``_suspended``
makes a generator of this code, which stops where the latents are prepared, and at ``scheduler.step``, which receives the model's
output and returns the next latents. So one call gives any number of velocities, with gradient, at any latents and noise levels, and
encodes the prompt and the images once.

Models of variance-preserving noise (epsilon, v and x0 predictions: Stable Diffusion, SDXL, PixArt) are rectified flows in other
coordinates. With sample = a x0 + s e: x = sample / (a + s), sigma = s / (a + s), and the velocity is e - x0. An Euler step in x is
then a step of DDIM (Song et al. 2020, arXiv 2010.02502). The first sigma is below 1.

A call has rows of one task only, so that a row's embeddings never depend on the length of another task's prompt, and the rows of a
group fit into one forward pass.
"""

import ast
import copy
import functools
import hashlib
import inspect
import math
import textwrap
import types
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, DPMSolverMultistepScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from tqdm.auto import tqdm

from retouch.models.offloading import on_device
from retouch.models.parts import LOCAL, Source, compute_device, diffusers_folder
from retouch.models.pipeline import Size, common_size
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task

TASKS = 1024
"""Tasks that a model remembers after they were encoded."""
CALLS = 16
"""Calls that stay suspended, with their encodings on the device."""
_STEPS = 28
"""The length of the schedule where nothing says one."""
_ENCODERS = ("encode_prompt", "encode_image", "rewire_prompt")
"""Methods of pipelines whose results are the same for every call with the same task and number of rows."""
_OWN_NOISE = ("LCM", "TCD", "SCM", "UnCLIP")
"""Parts of the names of schedulers whose steps draw noise that distilled models need."""
_REFUSALS = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError)
"""What a pipeline raises for rows or times that it does not expect."""


class PipelineCall:
    """One call of the pipeline for ``rows`` images of the task with the key ``task``, with a schedule of ``steps``.

    ``x`` is the fp32 state of the rectified flow in the layout that ``scheduler.step`` sees. ``generators``: for the noise; else
    they are keyed by the task, because some pipelines draw from them while they encode a source image. ``prepared``: the latents
    that the pipeline prepared.
    """

    # No dictionary: the hashes of a model's frozen weights look into the objects that it holds.
    __slots__ = ("_as_output", "_latents", "_levels", "_run", "_times", "model", "pipe", "prepared", "sigmas")

    def __init__(
        self,
        model: "AnyPipeline",
        task: int,
        rows: int,
        *,
        steps: int,
        generators: Sequence[torch.Generator] | None = None,
        output: str = "latent",
    ) -> None:
        self.model = model
        self.sigmas: Tensor = torch.empty(0)
        self._times: Tensor = torch.empty(0)
        self._levels: Sequence[float] | None = None
        self._as_output = False
        self.pipe: Any = copy.copy(model.pipe)  # what the call writes on the pipeline belongs to this call
        attributes = vars(self.pipe)
        attributes["scheduler"] = self._watched(model.scheduler)
        attributes["progress_bar"] = _no_progress
        memo = _latest(model.memo, (task, rows), dict)
        for name in _ENCODERS:
            if hasattr(self.pipe, name):
                attributes[name] = model.remember(memo, name, getattr(self.pipe, name))
        if (vae := getattr(self.pipe, "vae", None)) is not None:
            attributes["vae"] = vae = copy.copy(vae)  # shares the weights
            vars(vae)["encode"] = model.remember(memo, "vae", vae.encode)
        given = model.arguments(task, rows, steps=steps, output=output)
        if generators is not None:
            given["generator"] = list(generators)
        self._run: Generator[Any, Any, Any] = _suspended(type(model.pipe).__mro__[1])(self.pipe, **given)
        self._latents = next(self._run)
        self.prepared: Tensor = self._latents[0] if isinstance(self._latents, tuple) else self._latents

    def velocity(self, module: nn.Module, x: Tensor, sigma: Float[Tensor, " r"], levels: Sequence[float]) -> Float[Tensor, "r ..."]:
        """The velocity at ``x`` and ``sigma``; ``levels`` are the values of ``sigma`` on the host."""
        sample = self.model.sample(x, sigma)
        output, _ = self.step(module, sample, levels)
        return self.model.as_velocity(output.float(), sample, sigma)

    def step(self, module: nn.Module, sample: Tensor | None, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
        """What the pipeline gives to its scheduler at these levels: the model's output, and the sample. None: its own noise."""
        vars(self.pipe)[self.model.name] = module
        self._levels = levels
        try:
            if self._latents is None:
                assert sample is not None
                after = sample.to(self.prepared.dtype)
                made = self._run.send(SchedulerOutput(prev_sample=after) if self._as_output else (after,))
            else:
                made = self._start(sample)
        except StopIteration:  # it would end the loop of a caller
            raise ValueError(f"model: the loop of {type(self.pipe).__name__} ended before its schedule; it cannot train") from None
        output, shown, self._as_output = made
        return output, shown

    def _start(self, sample: Tensor | None) -> Any:
        first = self.prepared
        if sample is not None:
            first = sample.to(self.prepared.dtype)
            if self.model.narrow is not None:  # the channels that the pipeline adds for a source image
                dim, count = self.model.narrow
                first = torch.cat([first, self.prepared.narrow(dim, count, self.prepared.shape[dim] - count)], dim)
        latents = (first, *self._latents[1:]) if isinstance(self._latents, tuple) else first
        self._latents = None
        return self._run.send(latents)

    def schedule(self) -> Tensor:
        """sigma before each step and after the last; ends the call."""
        with suppress(StopIteration, _NoLevel):
            self._start(None)
        return self.sigmas

    def images(self, x: Tensor) -> Any:
        """The pipeline's result for clean ``x``, in the form of ``output``; ends the call."""
        self._levels = ()
        vae = getattr(self.model.pipe, "vae", None)
        try:
            with on_device(x.device, [] if vae is None else [vae]):
                self._start(self.model.sample(x, x.new_zeros(len(x))))
        except StopIteration as end:
            return end.value[0]
        raise ValueError(f"model: {type(self.pipe).__name__} steps without asking its schedule for a time")

    def _watched(self, scheduler: Any) -> Any:
        # Methods of the object, because pipelines ask for the exact class of their scheduler.
        made = copy.deepcopy(scheduler)
        own = made.set_timesteps

        @functools.wraps(own)
        def set_timesteps(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            self.sigmas, self._times = self.model.schedule(made)
            made.timesteps = _Times(self, self._times)

        @functools.wraps(made.step)
        def step(model_output: Any, timestep: Any, sample: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
            return model_output, sample, return_dict

        vars(made).update(set_timesteps=set_timesteps, step=step, order=1)
        return made

    def times(self) -> Iterator[tuple[int, Any]]:
        """The number and the time of each step, as the loop of the pipeline sees them: its own time where the level is in its
        schedule, interpolated elsewhere."""
        while True:
            levels = self._levels
            if levels is None:
                raise _NoLevel
            if not levels:
                return
            number = min(int((self.sigmas[:-1] > max(levels)).sum()), len(self._times) - 1)
            if min(levels) == max(levels) == float(self.sigmas[number]):
                yield number, self._times[number]
                continue
            own = dict(zip(self.sigmas.tolist(), self._times.tolist(), strict=False))
            # Rising sigmas and their times, between which a time is interpolated.
            if self.model.flow:
                end = float(self.model.scheduler.config.num_train_timesteps) if self.model.inverted else 0.0
                grid = [0.0, *reversed(self.sigmas[:-1].tolist())]
                times = [end, *reversed(self._times.float().tolist())]
            else:
                grid, times = self.model.levels.tolist(), list(range(len(self.model.levels)))
            found = [own[each] if each in own else float(np.interp(each, grid, times)) for each in levels]
            made = torch.tensor(found if min(levels) < max(levels) else found[:1], dtype=torch.float32, device=self._times.device)
            yield number, made.as_subclass(RowTimes) if len(made) > 1 else made[0]


class _NoLevel(Exception):
    """The loop of a call asks for a time before there is one."""


@functools.cache
def _suspended(kind: Any) -> Callable[..., Generator[Any, Any, Any]]:
    """``__call__`` of a pipeline class as a generator, without its decorators, which disable gradients.

    It yields the prepared latents and takes others, and yields what ``scheduler.step`` returns and takes its result. Raises
    ValueError for a method of another form.
    """
    function = inspect.unwrap(kind.__call__)
    refusal = f"model: {kind.__name__}.__call__"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ValueError(f"{refusal} has no source that could be read; define the class in a file") from None
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or function.__closure__:
        raise ValueError(f"{refusal} is no plain method, so its loop cannot be trained")
    definition.decorator_list = []
    visitor = _Yield(noise="prepare_latents" if "self.prepare_latents(" in source else "randn_tensor")
    visitor.visit(tree)
    if visitor.noises != 1:
        raise ValueError(f"{refusal} prepares its latents {visitor.noises} times and not once, so its loop cannot be trained")
    if not visitor.steps:
        raise ValueError(f"{refusal} calls no scheduler.step itself, so its loop cannot be trained")
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    file = inspect.getsourcefile(function) or "<pipeline>"
    # The method of a class that is imported already, with a `yield` in two places: no text from outside is compiled, and nothing is
    # run here. Its defaults are those of the method.
    module = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
    code = next(each for each in module.co_consts if isinstance(each, types.CodeType) and each.co_name == definition.name)
    names = {**function.__globals__, "enumerate": _numbered}
    made = types.FunctionType(code, names, definition.name, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def call_parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    """The arguments of ``__call__`` of a pipeline class. Raises ValueError for a class that cannot be trained."""
    found = inspect.signature(inspect.unwrap(kind.__call__)).parameters
    if "prompt" in found:
        _suspended(kind)
    if absent := [name for name in ("prompt", "num_inference_steps", "generator", "output_type") if name not in found]:
        raise ValueError(f"model: {kind.__name__}.__call__ takes no {' and no '.join(absent)}; it cannot train")
    return found


@dataclass(eq=False)
class _Yield(ast.NodeTransformer):
    """Puts a ``yield`` in front of the calls that prepare the latents, and of the calls of ``scheduler.step``."""

    noise: str
    noises: int = 0
    steps: int = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call, in a ``yield`` or as it is."""
        self.generic_visit(node)
        name = ast.unparse(node.func).removeprefix("self.")
        self.noises += name == self.noise
        self.steps += name == "scheduler.step"
        return ast.Yield(node) if name in (self.noise, "scheduler.step") else node


@dataclass(eq=False, repr=False)
class _Times:
    """The timesteps of a suspended call: as many as are asked for."""

    call: PipelineCall
    own: Tensor

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: Any) -> Any:
        found = self.own[index]
        return self if isinstance(index, slice) and len(found) == len(self) > 1 else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def to(self, *args: Any, **kwargs: Any) -> "_Times":
        """Itself: the times are already where they are needed."""
        return self

    def __iter__(self) -> Iterator[Any]:
        for _, time in self.call.times():
            yield time


def _numbered(values: Any, start: int = 0) -> Any:
    """``enumerate`` as the loop of a pipeline sees it: a step keeps its number in the schedule, whatever came before it. Pipelines
    end guidance, or skip layers, by this number."""
    return values.call.times() if isinstance(values, _Times) else enumerate(values, start)


class RowTimes(Tensor):
    """A time for each row in place of the one time of a loop: ``expand`` and ``repeat`` to n rows repeat the rows."""

    def _rows(self, count: int) -> Tensor:
        times = self.as_subclass(Tensor)
        if count % len(times):
            raise ValueError(f"{count} rows of {len(times)} times")
        return times.repeat(count // len(times))

    def expand(self, *shape: Any) -> Tensor:  # type: ignore[override]
        return self._rows(shape[0][0] if isinstance(shape[0], tuple | list) else shape[0])

    def repeat(self, *shape: Any) -> Tensor:
        return self._rows(shape[0])

    def unsqueeze(self, dim: int) -> Tensor:
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return self if index is None else self.as_subclass(Tensor)[index]


def _no_progress(iterable: Any = None, total: int | None = None) -> Any:
    return tqdm(disable=True) if iterable is None else iterable


def _fresh(value: Any) -> Any:
    """The same tensors in new lists, because pipelines append to lists that they were given."""
    return type(value)(map(_fresh, value)) if type(value) in (list, tuple) else value


def _seeded(task: int, rows: int) -> list[torch.Generator]:
    # The same for all rows: what a pipeline draws while it encodes a source image must not depend on a row's place in a call.
    return [torch.Generator().manual_seed(task % 2**63) for _ in range(rows)]


def _key(task: Task) -> int:
    """A number of everything of a task that a pipeline reads."""
    images = [image for image in (*task.images, task.mask) if image is not None]
    parts = [task.instruction.encode(), *(f"{image.mode} {image.size} ".encode() + image.tobytes() for image in images)]
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts))
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


class AnyPipeline:
    """A ``retouch.protocols.DenoisingModel`` whose velocity is computed by the ``__call__`` of a diffusers pipeline.

    ``pipe``: the loaded pipeline, which is not changed, except that its frozen parts are frozen and in eval mode. ``call``:
    arguments of every call, such as ``guidance_scale`` and ``negative_prompt``; the velocity is guided as the pipeline guides it.
    ``size``: (height, width) of the output in px; None is the pipeline's default, which editors derive from the source image.

    The rows of a conditioning name their tasks, so ``encode`` is cheap, and the encoders run in the first call of a task. Raises
    ValueError for pipelines that cannot work: several denoisers, no loop over a schedule, or steps of another kind.
    """

    def __init__(self, pipe: DiffusionPipeline, *, size: Size | None = None, call: dict[str, Any] | None = None) -> None:
        self.name = denoiser_name(pipe)
        self.module: nn.Module = getattr(pipe, self.name)
        kind: Any = type(pipe)
        self.pipe: Any = copy.copy(pipe)
        where = property(lambda _: compute_device(self.module))  # the frozen parts may wait in CPU memory
        vars(self.pipe).update(safety_checker=None)  # a reward would score black images
        self.pipe.__class__ = type(kind.__name__, (kind,), {"_execution_device": where, "device": where})
        self.parts = [self.module]
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name != self.name:
                self.parts.append(part.requires_grad_(False).eval())
        self.scheduler, self.flow = trained_scheduler(pipe.scheduler, of=type(pipe).__name__)
        self.inverted = bool(self.scheduler.config.get("invert_sigmas", False))
        if not self.flow:
            kept = self.scheduler.alphas_cumprod.double().cpu()
            self.levels = ((1 - kept).sqrt() / (kept.sqrt() + (1 - kept).sqrt())).float()  # sigma at each time of training
        self.size = size
        self.call = dict(call or {})
        self.parameters = call_parameters(kind)
        if unknown := [name for name in self.call if name not in self.parameters]:
            raise ValueError(
                f"model.call: {type(pipe).__name__} takes no {', '.join(unknown)}; it takes {', '.join([*self.parameters][1:])}"
            )
        self.repeats = "num_images_per_prompt" in self.parameters
        """Whether the pipeline repeats a prompt and an image for its rows."""
        self.alone = False
        """Whether the pipeline takes one row only."""
        self.row_times = True
        """Whether the rows of a forward pass may have different times."""
        self.narrow: tuple[int, int] | None = None
        """(axis, size) of x in the latents that the pipeline prepares, if those also hold a source image."""
        self._probed = False
        self._tasks: OrderedDict[int, Task] = OrderedDict()
        self.memo: OrderedDict[tuple[int, int], dict[Any, Any]] = OrderedDict()
        """The encodings of earlier calls, by task and number of rows."""
        self._calls: OrderedDict[tuple[int, int, int], PipelineCall] = OrderedDict()

    @classmethod
    def from_pretrained(
        cls,
        source: Source,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        size: Size | None = None,
        call: dict[str, Any] | None = None,
    ) -> "AnyPipeline":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline."""
        pipe: Any = source
        if isinstance(source, Path | str):
            pipe = DiffusionPipeline.from_pretrained(diffusers_folder(source), dtype=dtype, **LOCAL)
        return cls(pipe.to(device), size=size, call=call)

    @property
    def encoders(self) -> list[nn.Module]:
        """The frozen modules that encode prompts."""
        vae = getattr(self.pipe, "vae", None)
        return [part for part in self.parts[1:] if part is not vae]

    # What the pipeline is given.

    def arguments(self, key: int, rows: int, *, steps: int, output: str) -> dict[str, Any]:
        """The arguments of a call for ``rows`` images of a task. Raises ValueError for images that the pipeline does not take."""
        if key not in self._tasks:
            raise ValueError(f"more than {TASKS} tasks were encoded since this one; encode the tasks of a batch again")
        task = self._tasks[key]
        given: dict[str, Any] = {**self.call, "prompt": task.instruction if self.repeats else [task.instruction] * rows}
        if self.repeats:
            given["num_images_per_prompt"] = rows
        if self.size is not None and "height" in self.parameters:
            given |= {"height": self.size[0], "width": self.size[1]}
        images = list(task.images)
        if images:
            each = images[0] if len(images) == 1 else images
            given |= self._image("image", each if self.repeats else [each] * rows, task)
        given |= self._image("mask_image", task.mask, task) if task.mask is not None else {}
        given |= {"num_inference_steps": steps, "output_type": output, "return_dict": False, "generator": _seeded(key, rows)}
        # Pipelines write into lists that they are given.
        return {name: list(value) if isinstance(value, list) else value for name, value in given.items()}

    def _image(self, name: str, value: Any, task: Task) -> dict[str, Any]:
        if name == "image" and "images" in self.parameters:
            name, value = "images", value if isinstance(value, list) else [value]
        if name not in self.parameters:
            what = "mask" if name == "mask_image" else "source image"
            raise ValueError(f"task {task.id!r} has a {what}, and {type(self.pipe).__name__} takes none; leave it out of the data")
        return {name: value}

    def remember(self, memo: dict[Any, Any], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` without gradient and with the frozen parts on the device; its n-th result in a call is that of the first
        call."""
        count = iter(range(10**9))

        @functools.wraps(original)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            key = (name, next(count))
            if key not in memo:
                with torch.no_grad(), on_device(compute_device(self.module), self.parts[1:]):
                    memo[key] = original(*args, **kwargs)
            return _fresh(memo[key])

        return remembered

    # x and the pipeline's samples.

    def sample(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The pipeline's sample at ``x``: sqrt((1 - sigma)^2 + sigma^2) is 1 / (a + s)."""
        return x if self.flow else x / _norm(sigma, x)

    def as_velocity(self, output: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        """noise - data, from the output that the pipeline gives to its scheduler."""
        if self.flow:
            return -output if self.inverted else output
        level, top = sigma.view(-1, *[1] * (sample.dim() - 1)), float(self.levels[-1])
        norm, known = _norm(sigma.clamp(max=top), sample), level.clamp(max=top)
        a, s = (1 - known) / norm, known / norm
        if self.scheduler.config.prediction_type == "v_prediction":
            noise, x0 = s * sample + a * output, a * sample - s * output
        elif self.scheduler.config.prediction_type == "sample":
            noise, x0 = (sample - a * output) / s, output
        else:
            noise, x0 = output, (sample - s * output) / a
        # Objectives also draw noisier points than the model knows. There, an x0 from predicted noise would be divided by almost 0.
        return torch.where(level > top, (_norm(sigma, sample) * sample - x0) / level, noise - x0)

    def schedule(self, scheduler: Any) -> tuple[Tensor, Tensor]:
        """sigma before each step and after the last, (n + 1,) in fp32 on the CPU, and the times (n,) of a set scheduler."""
        times: Tensor = scheduler.timesteps
        if self.flow:
            sigmas = scheduler.sigmas.detach().to("cpu", torch.float32)
            return 1 - sigmas if self.inverted else sigmas, times
        return torch.cat([self.levels[times.cpu().long()], torch.zeros(1)]), times

    # retouch.protocols.DenoisingModel

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        keys = [_key(task) for task in tasks]
        for key, task in zip(keys, tasks, strict=True):
            self._tasks.pop(key, None)
            self._tasks[key] = task  # at the end
        for key in list(self._tasks)[:-TASKS]:
            del self._tasks[key]
        if not self._probed:
            self._probe(keys[0])
            self._probed = True
        return Conditioning({"task": torch.tensor(keys, device=compute_device(self.module))}, frozenset(), {"steps": _STEPS})

    @torch.no_grad()
    def _probe(self, task: int) -> None:
        """Find out how the pipeline takes rows, times and latents, by forward passes of its first two steps.

        Raises ValueError if it cannot be trained.
        """
        name, called = type(self.pipe).__name__, list[bool]()
        inner = [self.module, *self.module.children()]

        def count(module: nn.Module, args: Any) -> None:
            called.append(True)

        handles = [module.register_forward_pre_hook(count) for module in inner]
        try:
            levels = PipelineCall(self, task, 1, steps=4).schedule().tolist()
            if called:
                raise ValueError(
                    f"model: {name} calls its {self.name} before its loop, with weights that a run changes; it cannot train"
                )
            sample = self._probe_rows(task, levels)
        finally:
            for handle in handles:
                handle.remove()
        if not called:
            raise ValueError(f"model: the loop of {name} does not call its {self.name}; it cannot train")
        if self.alone:
            return
        sigma, x = torch.tensor(levels[:2], device=sample.device), sample.float()
        call = PipelineCall(self, task, 2, steps=4)
        each = [call.velocity(self.module, x, sigma[k].expand(2), [levels[k]] * 2)[k] for k in (0, 1)]
        try:
            both = call.velocity(self.module, x, sigma, levels[:2])
        except _REFUSALS:
            self.row_times = False
            return
        if type(x) is Tensor:  # a dry run has no values
            limit = 1e-5 if compute_dtype(self.module).itemsize > 2 else 2e-2
            off = max(float((one - two).abs().max() / one.abs().max().clamp(min=1e-6)) for one, two in zip(each, both, strict=True))
            self.row_times = off <= limit

    def _probe_rows(self, task: int, levels: Sequence[float]) -> Tensor:
        """Find a way to give the pipeline two rows, or one; the sample of the first step."""
        # Some pipelines do not repeat a source image for the rows of a prompt, and some take one row only.
        ways = [(True, False), (False, False), (True, True)] if self.repeats else [(False, False), (False, True)]
        for self.repeats, self.alone in ways:
            self.memo.clear()
            rows = 1 if self.alone else 2
            try:
                call = PipelineCall(self, task, rows, steps=4)
                _, sample = call.step(self.module, None, list(levels[:1]) * rows)
                if len(sample) == rows:
                    break
            except _REFUSALS:
                if self.alone:
                    raise
        else:
            raise ValueError(f"model: {type(self.pipe).__name__} steps in {len(sample)} rows for one image; it cannot train")
        differing = [dim for dim in range(sample.dim()) if sample.shape[dim] != call.prepared.shape[dim]]
        if sample.dim() != call.prepared.dim() or len(differing) > 1 or sample.numel() > call.prepared.numel():
            raise ValueError(
                f"model: {type(self.pipe).__name__} prepares latents of {tuple(call.prepared.shape)} and steps in "
                f"{tuple(sample.shape)}; it cannot train"
            )
        self.narrow = (differing[0], sample.shape[differing[0]]) if differing else None
        return sample

    @torch.no_grad()
    def compare(self, task: Task, num_steps: int) -> tuple[float, float]:
        """The largest difference of a chain to the pipeline's own, and of its velocities to the same in another order.

        Both relative to the largest value, on one row. The pipeline takes the steps of ``scheduler``, so that models of
        variance-preserving noise are compared with DDIM. A pipeline that keeps something from step to step, such as guidance with
        momentum, passes in order and not in another order.
        """
        conditioning, key = self.encode([task]), _key(task)
        sigmas = self.sigmas(num_steps, conditioning).to(compute_device(self.module))
        # The same generators: some pipelines draw from them while they encode a source image.
        x, states, velocities = self.initial_noise(conditioning, _seeded(key, 1)), [], []
        for k in range(num_steps):
            states.append(x)
            velocities.append(self.velocity(self.module, x, sigmas[k : k + 1], conditioning))
            x = x + (sigmas[k + 1] - sigmas[k]) * velocities[-1]
        if type(x) is not Tensor:  # a dry run has no values
            return 0.0, 0.0
        ours = PipelineCall(self, key, 1, steps=num_steps).images(x)
        pipe = copy.copy(self.pipe)
        vars(pipe)["scheduler"], vars(pipe)["progress_bar"] = copy.deepcopy(self.scheduler), _no_progress
        with on_device(compute_device(self.module), self.parts[1:]):
            theirs = pipe(**self.arguments(key, 1, steps=num_steps, output="latent"))[0]
        if not isinstance(theirs, Tensor):
            raise ValueError(f"model: {type(self.pipe).__name__} gives no latents with output_type 'latent'; it cannot train")
        self._calls.clear()  # a call of an update may begin at any step
        mixed = [*range(num_steps - 1, -1, -2), *range(0, num_steps, 2)]
        try:
            again = [self.velocity(self.module, states[k], sigmas[k : k + 1], conditioning) for k in mixed]
            pairs = zip(mixed, again, strict=True)
            order = max(float((one - velocities[k]).abs().max() / velocities[k].abs().max()) for k, one in pairs)
        except _REFUSALS:  # such as a cache that only the first step fills
            order = math.inf
        return float((ours - theirs).abs().max() / theirs.abs().max()), order

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        raise ValueError(
            f"rollout.guidance_scale: {type(self.pipe).__name__} guides by itself; set policy.model.call, such as "
            "{guidance_scale: 4.5}, and leave out rollout.guidance_scale"
        )

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        raise NotImplementedError("the pipeline combines the branches of guidance itself")

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        # The velocities of these rows belong to this schedule: pipelines read the number of a step.
        conditioning.shared["steps"] = num_steps  # type: ignore[index]
        return PipelineCall(self, int(conditioning.tensors["task"][0]), 1, steps=num_steps).schedule()

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        parts = []
        for key, rows in self._groups(conditioning):
            some = [generators[row] for row in rows]
            call = PipelineCall(self, key, len(rows), steps=conditioning.shared["steps"], generators=some)
            made = call.prepared if self.narrow is None else call.prepared.narrow(self.narrow[0], 0, self.narrow[1])
            if not self.flow:
                made = made.float() * _norm(call.schedule()[:1].to(made.device), made)
            parts.append((rows, made.float()))
        return _joined(parts)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r ..."]:
        steps, levels = conditioning.shared["steps"], sigma.tolist()
        x = x.contiguous()  # other strides choose other kernels, and in 16 bits the ratio would not be 1
        groups = self._groups(conditioning, None if self.row_times else levels)
        if len(groups) == 1:
            return self._call(groups[0][0], len(x), steps).velocity(module, x, sigma, levels)
        # In 16 bits, the rows of a forward pass change its results: the passes of a batch then have as many rows as the batch.
        count = len(x) if compute_dtype(module).itemsize == 2 else 0
        parts = []
        for key, rows in groups:
            filled = rows + rows[-1:] * (count - len(rows))
            given = x[filled], sigma[filled], [levels[row] for row in filled]
            parts.append((rows, self._call(key, len(filled), steps).velocity(module, *given)[: len(rows)]))
        return _joined(parts)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        """Clean x of images, of the size of the output of the task that was encoded last.

        The pipeline decodes z = D(x), where D scales, shifts and unpacks. Its Jacobian J has one entry a row, so that
        x = J^T (z - D(0)) / J^T J 1. Raises ValueError if D of this x is not z.
        """
        vae: Any = getattr(self.pipe, "vae", None)
        if vae is None:
            raise ValueError(f"model: {type(self.pipe).__name__} has no vae, so target images have no latents")
        task = next(reversed(self._tasks))
        call = PipelineCall(self, task, len(images), steps=_STEPS, output="pt")
        zero = torch.zeros_like(call.prepared, dtype=torch.float32)
        zero = zero if self.narrow is None else zero.narrow(self.narrow[0], 0, self.narrow[1])
        start, back = self._unpacked(task, zero)
        common_size([(image.height, image.width) for image in images])
        with torch.no_grad():
            size = PipelineCall(self, task, 1, steps=_STEPS, output="pt").images(zero[:1]).shape[-2:]
        pixels = VaeImageProcessor().preprocess(list(images), *size).to(start.device, vae.dtype)
        with torch.no_grad(), on_device(start.device, [vae]):
            made = vae.encode(pixels.unsqueeze(2) if start.dim() == 5 else pixels)
            z = made.latent_dist.mode() if hasattr(made, "latent_dist") else made[0]
        if z.shape != start.shape:
            raise ValueError(
                f"model: the autoencoder gives {tuple(z.shape)}, and {type(self.pipe).__name__} decodes {tuple(start.shape)}"
            )
        ones = torch.ones_like(zero)
        x = back(z.float() - start) / back(self._unpacked(task, ones)[0] - start)
        error = float((self._unpacked(task, x)[0] - z.float()).abs().max() / z.abs().max().clamp(min=1e-6))
        if error > (1e-3 if vae.dtype.itemsize > 2 else 2e-2):
            name = type(self.pipe).__name__
            raise ValueError(
                f"model: {name} decodes latents by more than scales and shifts (error {error:.1e}), so target images have no "
                "latents; use an objective without targets"
            )
        return x

    def _unpacked(self, task: int, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the autoencoder would decode for ``x``, and the product of its Jacobian's transpose with a vector."""
        call = PipelineCall(self, task, len(x), steps=_STEPS, output="pt")
        caught: list[Tensor] = []

        def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            caught.append(z)
            raise _Caught

        vars(call.pipe.vae)["decode"] = decode
        with torch.enable_grad():
            given = x.detach().clone().requires_grad_()
            with suppress(_Caught):
                call.images(given * 1)  # no leaf: some pipelines scale their latents in place
        (z,) = caught

        def back(vector: Tensor) -> Tensor:
            return torch.autograd.grad(z, given, vector.to(z.dtype), retain_graph=True)[0].float()

        return z.detach().float(), back

    def decode(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> list[Image]:
        with torch.no_grad():
            return [image for part in self._decoded(x, conditioning, "pil") for image in part]

    def decode_tensors(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> Float[Tensor, "r 3 h w"]:
        """``retouch.protocols.DecodesTensors``."""
        return torch.cat(self._decoded(x, conditioning, "pt")).float()

    def _decoded(self, x: Tensor, conditioning: Conditioning, output: str) -> list[Any]:
        # What follows the loop of a pipeline reads no prompt, so one task stands for all.
        task, steps = int(conditioning.tensors["task"][0]), conditioning.shared["steps"]
        parts = x.split(1 if self.alone else len(x))
        return [PipelineCall(self, task, len(part), steps=steps, output=output).images(part) for part in parts]

    def _groups(self, conditioning: Conditioning, levels: Sequence[float] | None = None) -> list[tuple[int, list[int]]]:
        """The rows of each call, with the key of their task; ``levels``: the rows of a call have the same."""
        groups: dict[Any, list[int]] = {}
        for row, key in enumerate(conditioning.tensors["task"].tolist()):
            groups.setdefault((key, levels and levels[row], row if self.alone else 0), []).append(row)
        return [(key, rows) for (key, _, _), rows in groups.items()]

    def _call(self, key: int, rows: int, steps: int) -> PipelineCall:
        made: PipelineCall = _latest(self._calls, (key, rows, steps), lambda: PipelineCall(self, key, rows, steps=steps))
        return made


class _Caught(Exception):
    pass


def _latest(kept: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """The entry of ``key``, made if there is none; the ``CALLS`` entries that were used last stay."""
    if key not in kept:
        kept[key] = make()
    kept.move_to_end(key)
    while len(kept) > CALLS:
        kept.popitem(last=False)
    return kept[key]


def _joined(parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """The rows of the parts in the order of their numbers. Raises ValueError if they have different shapes."""
    common_size([tuple(part.shape[1:]) for _, part in parts])
    order = [row for rows, _ in parts for row in rows]
    made = torch.cat([part for _, part in parts])
    return made if order == sorted(order) else made[[order.index(row) for row in range(len(order))]]


def _norm(sigma: Tensor, x: Tensor) -> Tensor:
    """sqrt((1 - sigma)^2 + sigma^2) of each row, in the shape of ``x``."""
    return ((1 - sigma).square() + sigma.square()).sqrt().view(-1, *[1] * (x.dim() - 1))


def denoiser_name(pipe: DiffusionPipeline) -> str:
    """The component that denoises. Raises ValueError if there is none, or more than one."""
    found = [
        name
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module) and name.startswith(("transformer", "unet", "prior", "decoder"))
    ]
    if len(found) != 1:
        what = " and ".join(found) if found else "no transformer or unet"
        raise ValueError(f"model: {type(pipe).__name__} has {what}; a run trains a pipeline with one denoiser")
    return found[0]


def trained_scheduler(scheduler: Any, *, of: str) -> tuple[Any, bool]:
    """The scheduler whose steps are trained, and whether its noise levels are those of a rectified flow.

    Other noise levels are those of DDIM with the settings of ``scheduler``. Raises ValueError for schedulers without such levels.
    """
    name, config = type(scheduler).__name__, scheduler.config
    refusal = f"model.scheduler: {of} has a {name}"
    if any(part in name for part in _OWN_NOISE):
        raise ValueError(f"{refusal}, whose steps draw noise of their own; give the pipeline another, if its model allows it")
    if config.get("stochastic_sampling"):
        raise ValueError(f"{refusal} with stochastic_sampling, which draws noise of its own; set it to False")
    if name == "FlowMatchEulerDiscreteScheduler":
        return scheduler, True
    if config.get("prediction_type") == "flow_prediction" or config.get("use_flow_sigmas"):  # of order 1, a step is an Euler step
        return DPMSolverMultistepScheduler.from_config(config, solver_order=1, algorithm_type="dpmsolver++"), True
    if not hasattr(scheduler, "alphas_cumprod") or config.get("prediction_type") not in ("epsilon", "v_prediction", "sample"):
        raise ValueError(f"{refusal}, which is not supported; give the pipeline a DDIM or a FlowMatchEulerDiscrete scheduler")
    return DDIMScheduler.from_config(config, clip_sample=False, thresholding=False, set_alpha_to_one=True), False
