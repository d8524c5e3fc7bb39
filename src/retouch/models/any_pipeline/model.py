"""Any diffusers pipeline as a flow-matching model: its own ``__call__``, suspended inside its denoising loop, is the velocity.

A pipeline encodes prompts and images, packs latents and combines the branches of guidance in code of its own. ``PipelineCall`` runs
this code in a greenlet, which stops where the pipeline prepares its latents, where its loop asks for the next timestep, and in
``scheduler.step``, which receives the model's output and returns the next latents. So one call gives any number of velocities, with
gradient, at any latents and noise levels, and encodes the prompt and the images once.

Models of variance-preserving noise (epsilon, v and x0 predictions: Stable Diffusion, SDXL, PixArt) are rectified flows in other
coordinates. With sample = a x0 + s e: x = sample / (a + s), sigma = s / (a + s), and the velocity is e - x0. An Euler step in x is
then a step of DDIM (Song et al. 2020, arXiv 2010.02502). The first sigma is below 1.

A call has rows of one task only, so that a row's embeddings never depend on the length of another task's prompt, and the rows of a
group fit into one forward pass.
"""

import copy
import functools
import hashlib
import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DiffusionPipeline
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from greenlet import getcurrent, greenlet
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.models.parts import LOCAL, Source, compute_device, diffusers_folder
from retouch.models.pipeline import Size, common_size
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task

TASKS = 1024
"""Tasks that a model remembers after they were encoded."""
CALLS = 16
"""Calls that stay suspended, with their encodings on the device."""
_ENCODERS = ("encode_prompt", "encode_image", "rewire_prompt")
"""Methods of pipelines whose results are the same for every call with the same task and number of rows."""
_OWN_NOISE = ("LCM", "TCD", "SCM", "TrigFlow", "EDM", "CosineDPM", "Discrete", "Amused", "VQ", "KarrasVe", "IPNDM", "UnCLIP")
"""Parts of the names of schedulers whose noise levels or steps have no counterpart in a rectified flow."""


class PipelineCall:
    """One call of the pipeline for ``rows`` images of ``task`` with a schedule of ``steps``.

    ``x`` is the fp32 state of the rectified flow in the layout that ``scheduler.step`` sees. ``generators``: for the noise; else
    they are keyed by the task, because some pipelines draw from them while they encode a source image.
    """

    def __init__(
        self,
        model: "AnyPipeline",
        task: Task,
        rows: int,
        *,
        steps: int,
        generators: Sequence[torch.Generator] | None = None,
        output: str = "latent",
    ) -> None:
        self.model = model
        self.sigmas: Tensor = torch.empty(0)
        self._times: Tensor = torch.empty(0)
        self._shown: Tensor | None = None
        pipe = copy.copy(model.pipe)  # what the call writes on the pipeline belongs to this call
        self.pipe: Any = pipe
        attributes = vars(pipe)
        attributes["scheduler"] = self._capturing(model.scheduler)
        attributes["prepare_latents"] = self._prepare(pipe.prepare_latents)
        attributes["progress_bar"] = _no_progress
        memo = model.memo(task, rows)
        for name in _ENCODERS:
            if hasattr(pipe, name):
                attributes[name] = _remember(memo, name, getattr(pipe, name))
        if (vae := getattr(pipe, "vae", None)) is not None:
            attributes["vae"] = vae = copy.copy(vae)  # shares the weights
            vars(vae)["encode"] = _remember(memo, "vae", vae.encode)
        given = {**model.arguments(task, rows), "num_inference_steps": steps, "output_type": output, "return_dict": False}
        given["generator"] = _seeded(task, rows) if generators is None else list(generators)
        body = types.FunctionType(
            (function := _body(type(pipe))).__code__,
            {**function.__globals__, "enumerate": _numbered},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        body.__kwdefaults__ = function.__kwdefaults__
        self._work = greenlet(lambda _: ("end", body(pipe, **given)))
        self._event: tuple[Any, ...] = self._resume(None)
        self.prepared: Tensor = self._expect("prepare")

    def _resume(self, reply: Any) -> tuple[Any, ...]:
        self._work.parent = getcurrent()
        event: tuple[Any, ...] = self._work.switch(reply)
        return event

    def _expect(self, kind: str) -> Any:
        if self._event[0] != kind:
            raise ValueError(
                f"model: {type(self.pipe).__name__} {_SEEN[self._event[0]]} where it was expected to {_EXPECTED[kind]}, so its "
                "denoising loop cannot be trained; a model class of your own can (docs/your-own.md)"
            )
        return self._event[1]

    def open(self, x: Tensor | None = None, sigma: Tensor | None = None) -> None:
        """Run up to the denoising loop, with ``x`` in place of the noise."""
        sample = self.prepared if x is None else self.model.widened(self.model.sample(x, sigma), self.prepared)
        self._event = self._resume(sample)
        self._expect("time")

    def velocity(self, module: nn.Module, x: Tensor, sigma: Float[Tensor, " r"], levels: Sequence[float]) -> Float[Tensor, "r ..."]:
        """The velocity at ``x`` and ``sigma``; ``levels`` are the values of ``sigma`` on the host."""
        sample = self.model.sample(x, sigma)
        if self._event[0] == "prepare":
            self.open(x, sigma)
        else:
            self._event = self._resume(sample.to(self.prepared.dtype))
            self._expect("time")
        vars(self.pipe)[self.model.name] = module
        self._event = self._resume(self._time(levels))
        output = self._expect("step")
        self._shown = self._event[2]
        return self.model.as_velocity(output.float(), sample, sigma)

    def _time(self, levels: Sequence[float]) -> tuple[int, Any]:
        """The number of the step and its time: the pipeline's own where the level is in its schedule, interpolated elsewhere."""
        number = min(int((self.sigmas[:-1] > max(levels)).sum()), len(self._times) - 1)
        if min(levels) == max(levels) == float(self.sigmas[number]):
            return number, self._times[number]
        own = dict(zip(self.sigmas.tolist(), self._times.tolist(), strict=False))
        grid, times = self.model.time_grid(self.sigmas, self._times)
        found = [own[each] if each in own else float(np.interp(each, grid, times)) for each in levels]
        made = torch.tensor(found if min(levels) < max(levels) else found[:1], dtype=torch.float32, device=self._times.device)
        return number, RowTimes.of(made) if len(made) > 1 else made[0]

    def images(self, x: Tensor) -> Any:
        """The pipeline's result for clean ``x``, in the form of ``output``."""
        self.open(x, x.new_zeros(len(x)))
        self._event = self._resume(None)
        return self._expect("end")[0]

    def close(self) -> None:
        """End the call."""
        if not self._work.dead:
            self._work.parent = getcurrent()
            self._work.throw()

    def _prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            first = made[0] if isinstance(made, tuple) else made
            sample = self._work.parent.switch(("prepare", first))
            return (sample, *made[1:]) if isinstance(made, tuple) else sample

        return prepare

    def _capturing(self, scheduler: Any) -> Any:
        base, call = type(scheduler), self

        class Capturing(base):  # type: ignore[misc, valid-type]
            order = 1

            @functools.wraps(base.set_timesteps)
            def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
                base.set_timesteps(self, *args, **kwargs)
                call.sigmas, call._times = call.model.schedule(self)
                self.timesteps = _Times(call, call._times)

            @functools.wraps(base.step)
            def step(self, model_output: Any, timestep: Any, sample: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
                after = call._work.parent.switch(("step", model_output, sample))
                return SchedulerOutput(prev_sample=after) if return_dict else (after,)

        Capturing.__name__ = base.__name__
        made = copy.deepcopy(scheduler)
        made.__class__ = Capturing
        return made

    def next_time(self) -> Iterator[tuple[int, Any]]:
        """The numbers and times that the loop of the pipeline sees, until it is told to stop."""
        while (asked := self._work.parent.switch(("time", None))) is not None:
            yield asked


_EXPECTED = {
    "prepare": "call prepare_latents",
    "time": "ask its schedule for the next timestep",
    "step": "call scheduler.step",
    "end": "end",
}
_SEEN = {
    "prepare": "calls prepare_latents again",
    "time": "asks for the next timestep",
    "step": "calls scheduler.step",
    "end": "ends",
}


class _Times:
    """The timesteps of a suspended call: as many as are asked for."""

    def __init__(self, call: PipelineCall, own: Tensor) -> None:
        self.call, self.own = call, own

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: Any) -> Any:
        return self.own[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def to(self, *args: Any, **kwargs: Any) -> "_Times":
        """Itself: the times are already where they are needed."""
        return self

    def __iter__(self) -> Iterator[Any]:
        for _, time in self.call.next_time():
            yield time


def _numbered(values: Any, start: int = 0) -> Any:
    """``enumerate`` as the loop of a pipeline sees it: a step keeps its number in the schedule, whatever came before it. Pipelines
    end guidance, or skip layers, by this number."""
    return values.call.next_time() if isinstance(values, _Times) else enumerate(values, start)


class RowTimes(Tensor):
    """A time for each row in place of the one time of a loop: ``expand`` and ``repeat`` to n rows repeat the rows."""

    @staticmethod
    def of(times: Float[Tensor, " r"]) -> "RowTimes":
        """``times`` as such a tensor."""
        return times.as_subclass(RowTimes)

    def _rows(self, count: int) -> Tensor:
        times = self.as_subclass(Tensor)
        if count % len(times):
            raise ValueError(f"{count} rows of {len(times)} times")
        return times.repeat(count // len(times))

    def expand(self, *shape: Any) -> Tensor:  # type: ignore[override]
        return self._rows(shape[0][0] if isinstance(shape[0], tuple | list) else shape[0])

    def repeat(self, *shape: Any) -> Tensor:  # type: ignore[override]
        return self._rows(shape[0])

    def unsqueeze(self, dim: int) -> Tensor:
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return self if index is None else self.as_subclass(Tensor)[index]


class _NoProgress:
    def __enter__(self) -> "_NoProgress":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        """Nothing is shown."""


def _no_progress(iterable: Any = None, total: int | None = None) -> Any:
    return _NoProgress() if iterable is None else iterable


def _body(kind: type) -> types.FunctionType:
    """``__call__`` of a pipeline class without its ``torch.no_grad``. Raises ValueError if it has another form."""
    found = getattr(kind.__call__, "__wrapped__", None)
    if not isinstance(found, types.FunctionType):
        raise ValueError(f"model: {kind.__name__}.__call__ is not decorated with torch.no_grad() alone, so no gradient can pass it")
    return found


def _remember(memo: dict[Any, Any], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` without gradient; its n-th result in a call is that of the first call."""
    count = iter(range(10**9))

    @functools.wraps(original)
    def remembered(*args: Any, **kwargs: Any) -> Any:
        key = (name, next(count))
        if key not in memo:
            with torch.no_grad():
                memo[key] = original(*args, **kwargs)
        return _fresh(memo[key])

    return remembered


def _fresh(value: Any) -> Any:
    """The same tensors in new lists, because pipelines append to lists that they were given."""
    return type(value)(map(_fresh, value)) if type(value) in (list, tuple) else value


def _seeded(task: Task, rows: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(_key(task) % 2**63 + row) for row in range(rows)]


def _key(task: Task) -> int:
    """A number of everything of a task that a pipeline reads."""
    images = [image for image in (*task.images, task.mask) if image is not None]
    parts = [task.instruction.encode(), *(f"{image.mode} {image.size} ".encode() + image.tobytes() for image in images)]
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts))
    return int.from_bytes(digest.digest()[:8], "big", signed=True)


class AnyPipeline:
    """A ``retouch.protocols.DenoisingModel`` whose velocity is computed by the ``__call__`` of a diffusers pipeline.

    ``pipe``: the loaded pipeline, which is not changed, except that its frozen parts are frozen and in eval mode. ``call``: arguments
    of every call, such as ``guidance_scale`` and ``negative_prompt``; the velocity is guided as the pipeline guides it. ``size``:
    (height, width) of the output in px; None is the pipeline's default, which editors derive from the source image. ``steps``: the
    length of the schedule where nothing says one.

    The rows of a conditioning name their tasks, so ``encode`` is cheap, and the encoders run in the first call of a task. Raises
    ValueError for pipelines that cannot work: several denoisers, no loop over a schedule, or steps of another kind.
    """

    def __init__(
        self, pipe: DiffusionPipeline, *, size: Size | None = None, call: dict[str, Any] | None = None, steps: int = 28
    ) -> None:
        self.name = denoiser_name(pipe)
        self.module: nn.Module = getattr(pipe, self.name)
        self.pipe: Any = copy.copy(pipe)
        self.parts = [self.module]
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name != self.name:
                self.parts.append(part.requires_grad_(False).eval())
        self.scheduler, self.flow = trained_scheduler(pipe.scheduler, of=type(pipe).__name__)
        self.inverted = bool(self.scheduler.config.get("invert_sigmas", False))
        self.size, self.steps = size, steps
        self.call = dict(call or {})
        self.parameters = inspect.signature(_body(type(pipe))).parameters
        if not hasattr(pipe, "prepare_latents") or "generator" not in self.parameters:
            raise ValueError(f"model: {type(pipe).__name__} has no prepare_latents, so its noise cannot be replaced")
        if unknown := [name for name in self.call if name not in self.parameters]:
            raise ValueError(f"model.call: {type(pipe).__name__} takes no {', '.join(unknown)}; it takes {', '.join(self.parameters)}")
        self.row_times = True
        self.narrow: tuple[int, int] | None = None
        self._tasks: OrderedDict[int, Task] = OrderedDict()
        self._memo: OrderedDict[tuple[int, int], dict[Any, Any]] = OrderedDict()
        self._calls: OrderedDict[tuple[int, int, int], PipelineCall] = OrderedDict()
        self._schedules: dict[tuple[Any, ...], Tensor] = {}

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
            pipe = DiffusionPipeline.from_pretrained(diffusers_folder(source), torch_dtype=dtype, **LOCAL)
        return cls(pipe.to(device), size=size, call=call)

    # What the pipeline is given.

    def arguments(self, task: Task, rows: int) -> dict[str, Any]:
        """The arguments of a call for ``rows`` images of the task. Raises ValueError for images that the pipeline does not take."""
        given: dict[str, Any] = dict(self.call)
        repeats = "num_images_per_prompt" in self.parameters
        given |= {"prompt": task.instruction, "num_images_per_prompt": rows} if repeats else {"prompt": [task.instruction] * rows}
        if self.size is not None and "height" in self.parameters:
            given |= {"height": self.size[0], "width": self.size[1]}
        for name, value in (("image", task.images), ("mask_image", task.mask)):
            if not value:
                continue
            if name not in self.parameters:
                raise ValueError(f"task {task.id!r}: {type(self.pipe).__name__} takes no {name}; give data without, or another model")
            given[name] = value[0] if isinstance(value, tuple) and len(value) == 1 else list(value) if name == "image" else value
        # Pipelines write into lists that they are given.
        return {name: list(value) if isinstance(value, list) else value for name, value in given.items()}

    def memo(self, task: Task, rows: int) -> dict[Any, Any]:
        """The encodings of earlier calls with this task and number of rows."""
        return _latest(self._memo, (_key(task), rows), dict, most=CALLS)

    # x and the pipeline's samples.

    def sample(self, x: Tensor, sigma: Tensor | None) -> Tensor:
        """The pipeline's sample at ``x``: sqrt((1 - sigma)^2 + sigma^2) is 1 / (a + s)."""
        return x if self.flow or sigma is None else x / _norm(sigma, x)

    def as_velocity(self, output: Tensor, sample: Tensor, sigma: Tensor) -> Tensor:
        """noise - data, from the output that the pipeline gives to its scheduler."""
        if self.flow:
            return -output if self.inverted else output
        norm, level = _norm(sigma, sample), sigma.view(-1, *[1] * (sample.dim() - 1))
        a, s = (1 - level) / norm, level / norm
        kind = self.scheduler.config.prediction_type
        if kind == "v_prediction":
            return (s * sample + a * output) - (a * sample - s * output)
        if kind == "sample":
            return (sample - a * output) / s - output
        return output - (sample - s * output) / a

    def widened(self, sample: Tensor, prepared: Tensor) -> Tensor:
        """``sample`` in the dtype of the prepared latents, with the channels that the pipeline adds for a source image."""
        if self.narrow is not None:
            dim, count = self.narrow
            more = prepared.narrow(dim, count, prepared.shape[dim] - count)
            return torch.cat([sample.to(prepared.dtype), more], dim)
        return sample.to(prepared.dtype)

    def schedule(self, scheduler: Any) -> tuple[Tensor, Tensor]:
        """sigma before each step and after the last, (n + 1,) in fp32 on the CPU, and the times (n,) of a scheduler that was set."""
        times: Tensor = scheduler.timesteps
        if self.flow:
            sigmas = scheduler.sigmas.detach().to("cpu", torch.float32)
            return 1 - sigmas if self.inverted else sigmas, times
        return torch.cat([self._levels()[times.cpu().long()], torch.zeros(1)]), times

    def _levels(self) -> Tensor:
        every = self.scheduler.alphas_cumprod.double().cpu()
        a, s = every.sqrt(), (1 - every).sqrt()
        return (s / (a + s)).float()

    def time_grid(self, sigmas: Tensor, times: Tensor) -> tuple[list[float], list[float]]:
        """Rising sigmas and their times, between which a time is interpolated."""
        if not self.flow:
            return self._levels().tolist(), list(range(len(self._levels())))
        end = float(self.scheduler.config.num_train_timesteps) if self.inverted else 0.0
        return [0.0, *reversed(sigmas[:-1].tolist())], [end, *reversed(times.float().tolist())]

    # retouch.protocols.DenoisingModel

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        keys = [_key(task) for task in tasks]
        for key, task in zip(keys, tasks, strict=True):
            _latest(self._tasks, key, lambda task=task: task, most=TASKS)
        return Conditioning({"task": torch.tensor(keys, device=compute_device(self.module))}, frozenset(), {"steps": self.steps})

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
        call = PipelineCall(self, self._task(conditioning.tensors["task"][:1].tolist()[0]), 1, steps=num_steps)
        key = (num_steps, tuple(call.prepared.shape))
        if key not in self._schedules:
            call.open()
            self._schedules[key] = call.sigmas
        call.close()
        return self._schedules[key]

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        parts = []
        for key, rows in _by_task(conditioning):
            some = [generators[row] for row in rows]
            call = PipelineCall(self, self._task(key), len(rows), steps=conditioning.shared["steps"], generators=some)
            made = call.prepared if self.narrow is None else call.prepared.narrow(self.narrow[0], 0, self.narrow[1])
            if not self.flow:
                call.open()
                first = call.sigmas[:1].to(made.device)
                made = made.float() * _norm(first, made)
            call.close()
            parts.append((rows, made.float()))
        return _joined(parts)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r ..."]:
        steps, levels = conditioning.shared["steps"], sigma.tolist()
        groups = _by_task(conditioning)
        if not self.row_times:
            groups = [(key, same) for key, rows in groups for same in _by_level(rows, levels)]
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
        vae: Any = self.pipe.vae
        call = PipelineCall(self, next(reversed(self._tasks.values())), len(images), steps=self.steps, output="pt")
        zero = torch.zeros_like(call.prepared, dtype=torch.float32)
        zero = zero if self.narrow is None else zero.narrow(self.narrow[0], 0, self.narrow[1])
        call.close()
        start, back = self._unpacked(zero, len(images))
        factor = getattr(self.pipe, "vae_scale_factor", 8)
        size = start.shape[-2] * factor, start.shape[-1] * factor
        common_size([(image.height, image.width) for image in images])
        pixels = self.pipe.image_processor.preprocess(list(images), *size).to(compute_device(vae), vae.dtype)
        with torch.no_grad():
            made = vae.encode(pixels.unsqueeze(2) if start.dim() == 5 else pixels)
            z = (made.latent if hasattr(made, "latent") else made.latent_dist.mode()).float()
        if z.shape != start.shape:
            raise ValueError(f"model: the autoencoder gives {tuple(z.shape)}, and {type(self.pipe).__name__} decodes {tuple(start.shape)}")
        ones = torch.ones_like(zero)
        x = back(z - start) / back(self._unpacked(ones, len(images))[0] - start)
        error = float((self._unpacked(x, len(images))[0] - z).abs().max() / z.abs().max().clamp(min=1e-6))
        if error > 1e-3:
            raise ValueError(
                f"model: {type(self.pipe).__name__} does not decode latents by scales and shifts alone (error {error:.1e}), so target "
                "images have no latents; use an objective without targets"
            )
        return x

    def _unpacked(self, x: Tensor, rows: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the autoencoder would decode for ``x``, and the product of its Jacobian's transpose with a vector."""
        call = PipelineCall(self, next(reversed(self._tasks.values())), rows, steps=self.steps, output="pt")
        caught: list[Tensor] = []

        def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            caught.append(z)
            raise _Caught

        vars(call.pipe.vae)["decode"] = decode
        with torch.enable_grad():
            given = x.detach().clone().requires_grad_()
            try:
                call.images(given)
            except _Caught:
                pass
        (z,) = caught

        def back(vector: Tensor) -> Tensor:
            return torch.autograd.grad(z, given, vector.to(z.dtype), retain_graph=True)[0].float()

        return z.detach().float(), back

    def decode(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> list[Image]:
        with torch.no_grad():
            found: list[Image | None] = [None] * len(x)
            for key, rows in _by_task(conditioning):
                made = PipelineCall(self, self._task(key), len(rows), steps=conditioning.shared["steps"], output="pil").images(x[rows])
                for row, image in zip(rows, made, strict=True):
                    found[row] = image
        return [image for image in found if image is not None]

    def decode_tensors(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> Float[Tensor, "r 3 h w"]:
        """``retouch.protocols.DecodesTensors``."""
        parts = []
        for key, rows in _by_task(conditioning):
            call = PipelineCall(self, self._task(key), len(rows), steps=conditioning.shared["steps"], output="pt")
            parts.append((rows, call.images(x[rows]).float()))
        return _joined(parts)

    def _task(self, key: int) -> Task:
        if key not in self._tasks:
            raise ValueError(f"more than {TASKS} tasks were encoded since this one; encode the tasks of a batch again")
        return self._tasks[key]

    def _call(self, key: int, rows: int, steps: int) -> PipelineCall:
        made = _latest(self._calls, (key, rows, steps), lambda: PipelineCall(self, self._task(key), rows, steps=steps), most=CALLS)
        return made


class _Caught(Exception):
    pass


def _latest(kept: OrderedDict[Any, Any], key: Any, make: Callable[[], Any], *, most: int) -> Any:
    """The entry of ``key``, made if there is none; the ``most`` entries that were used last stay."""
    if key not in kept:
        kept[key] = make()
    kept.move_to_end(key)
    while len(kept) > most:
        _, old = kept.popitem(last=False)
        if isinstance(old, PipelineCall):
            old.close()
    return kept[key]


def _by_task(conditioning: Conditioning) -> list[tuple[int, list[int]]]:
    rows: dict[int, list[int]] = {}
    for row, key in enumerate(conditioning.tensors["task"].tolist()):
        rows.setdefault(key, []).append(row)
    return list(rows.items())


def _by_level(rows: Sequence[int], levels: Sequence[float]) -> list[list[int]]:
    found: dict[float, list[int]] = {}
    for row in rows:
        found.setdefault(levels[row], []).append(row)
    return list(found.values())


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
    if any(part in name for part in _OWN_NOISE) and "Euler" not in name and "FlowMatch" not in name:
        raise ValueError(f"{refusal}, whose steps draw noise of their own or have other noise levels; give the pipeline another")
    flow = "FlowMatch" in name or config.get("prediction_type") == "flow_prediction" or bool(config.get("use_flow_sigmas"))
    if config.get("stochastic_sampling"):
        raise ValueError(f"{refusal} with stochastic_sampling, which draws noise of its own; set it to False")
    if flow:
        return scheduler, True
    if not hasattr(scheduler, "alphas_cumprod") or config.get("prediction_type") not in ("epsilon", "v_prediction", "sample"):
        raise ValueError(f"{refusal}, whose noise levels are not known; give the pipeline a DDIMScheduler or a flow-matching scheduler")
    return DDIMScheduler.from_config(config, clip_sample=False, thresholding=False, set_alpha_to_one=True), False
