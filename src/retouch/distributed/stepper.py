"""Who owns backward, clipping and the optimizer's step. The loop and the objectives do not know which one it is."""

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from retouch.distributed.ranks import Ranks


class NonFiniteGradient(ValueError):
    """The loss or its gradient is NaN or infinite; the step was not taken."""


@runtime_checkable
class Stepper(Protocol):
    """Accumulates gradients over backward calls and takes optimizer steps.

    ``module``: what every forward with gradient goes through.
    """

    module: nn.Module

    def backward(self, loss: Tensor) -> None: ...

    def step(self, learning_rate: float) -> float: ...

    def state(self) -> dict[str, Tensor]: ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


class ReplicatedStepper:
    """AdamW over weights that every rank holds whole.

    Losses are shares of one global loss, so gradients are summed over ranks, in one flat all-reduce a step. That is what DDP
    does with all but the last backward outside its synchronisation, without its need to know which parameters take part.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: Ranks,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        self.module = module
        self.ranks = ranks
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._strayed = False
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share."""
        # A clamp lets a NaN through in the value and stops it in the gradient, so the gradient alone would not tell.
        self._strayed = self._strayed or not bool(torch.isfinite(loss))
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """Reduce, clip, step, forget the gradient. Returns the norm before clipping; NonFiniteGradient where it is no number."""
        if self.ranks.any(self._strayed):
            self._strayed = False
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                "the loss is not finite: no step was taken. Lower learning_rate, and look at the last pictures in samples/"
            )
        self._reduce()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                f"the gradient's norm is {norm.item()}: no step was taken. Lower learning_rate, and look at the last pictures in "
                "samples/ for what went wrong before"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _reduce(self) -> None:
        if self.ranks.world == 1:
            return
        # A parameter that took no part has no gradient on any rank, and must keep none: AdamW would decay it.
        touched = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in touched if parameter.grad is not None]
        flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(touched, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, by ``<parameter>/<name>``; empty before the first step."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave."""
        self.optimizer.state.clear()
        for name, tensor in state.items():
            parameter_name, key = name.rsplit("/", 1)
            if parameter_name not in self.parameters:
                raise ValueError(f"the checkpoint's optimizer knows {parameter_name}, which does not train in this run")
            parameter = self.parameters[parameter_name]
            self.optimizer.state[parameter][key] = self._kept(parameter, tensor)

    def _kept(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """What the optimizer keeps of a parameter's tensor in a checkpoint."""
        return tensor.clone()
