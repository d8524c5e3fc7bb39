"""Records the network calls of a training step with their inputs, and repeats them in a plain loop.

Recorded are the calls of the transformer, the text encoders, the encoder and decoder of the autoencoder, every backward pass and
every optimizer step. Everything that a library adds is left out: tokens, noise, transitions, losses, images, scores, advantages,
bookkeeping.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from retouch.distributed.optimizer import ReplicatedStepper
from retouch.models.pipeline import PipelineModel
from retouch.protocols import DenoisingModel
from retouch.run.step import Run
from retouch_models.qwen_image.model import QwenImageEdit


@dataclass(eq=False)
class Call:
    """A forward pass. ``gradient``: the gradient of its output if a backward pass followed, else None."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stage: str
    gradient: Tensor | None = None

    def make(self) -> None:
        if self.gradient is None:
            with torch.no_grad():
                self.function(*self.args, **self.kwargs)
        else:
            torch.autograd.backward(self.function(*self.args, **self.kwargs)[0], self.gradient)


@dataclass(eq=False)
class Step:
    """An optimizer step."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    max_norm: float
    stage: str = "update"

    def make(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(eq=False)
class ModelCalls:
    """The network calls of one training step, in order."""

    calls: list[Call | Step] = field(default_factory=list)

    def make(self) -> tuple[float, dict[str, float]]:
        """Repeat all calls. Returns the seconds of the whole loop, and of each stage."""
        stages: dict[str, float] = {}
        began = last = time.perf_counter()
        for call in self.calls:
            call.make()
            now = time.perf_counter()
            stages[call.stage] = stages.get(call.stage, 0.0) + now - last
            last = now
        return last - began, stages


class Recorder:
    """Records the network calls of a run. Recorded optimizer steps have learning rate 0, so repeating them changes no weight."""

    def __init__(self, model: DenoisingModel, run: Run) -> None:
        assert isinstance(run.stepper, ReplicatedStepper)
        self.networks = _networks(model)
        self.run = run
        parameters = list(run.stepper.parameters.values())
        optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0)
        self.step = Step(optimizer, parameters, run.stepper.max_grad_norm)
        self.stage = ""

    @contextmanager
    def recording(self) -> Iterator[tuple[Run, ModelCalls]]:
        """Record inside this block. Gives the run to use, and the list to which its calls are added."""
        made = ModelCalls()
        with ExitStack() as patches:
            for owner, method, encodes in self.networks:
                patches.enter_context(_replaced(owner, method, self._recorded(getattr(owner, method), encodes, made)))
            taken = self.run.stepper.step

            def step(learning_rate: float) -> float:
                made.calls.append(self.step)
                return taken(learning_rate)

            patches.enter_context(_replaced(self.run.stepper, "step", step))
            yield replace(self.run, clock=self._clock), made

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        self.stage = stage
        yield

    def _recorded(self, function: Callable[..., Any], encodes: bool, made: ModelCalls) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            entry = Call(function, args, kwargs, "encode" if encodes else self.stage)
            made.calls.append(entry)
            output = function(*args, **kwargs)
            if torch.is_grad_enabled() and not encodes:
                output[0].register_hook(lambda gradient: setattr(entry, "gradient", gradient.detach().clone()))
            return output

        return call


def _networks(model: DenoisingModel) -> list[tuple[nn.Module, str, bool]]:
    """For each network of the model: the module, the method that is called, and whether this call encodes the task."""
    assert isinstance(model, PipelineModel)
    encoders = [encoder.model if isinstance(model, QwenImageEdit) else encoder for encoder in model.text.encoders]
    return [
        (model.module, "forward", False),
        *((encoder, "forward", True) for encoder in encoders),
        (model.latents.vae, "encode", True),
        (model.latents.vae, "decode", False),
    ]


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, replace an attribute of this object by an instance attribute, which hides that of the class."""
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
