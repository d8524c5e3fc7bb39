"""Steppers: they own the backward pass, gradient clipping and the optimizer step, for any kind of sharding."""

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from retouch.distributed.ranks import Ranks


class NonFiniteGradient(ValueError):
    """The loss or its gradient is NaN or infinite; the optimizer step was skipped."""


@runtime_checkable
class Stepper(Protocol):
    """Accumulates gradients over calls of ``backward`` and takes optimizer steps.

    ``module``: the module through which every forward pass with gradient must go.
    """

    module: nn.Module

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, this rank's scalar share of the global loss."""
        ...

    def step(self, learning_rate: float) -> float:
        """Take one optimizer step and clear the gradients. Returns the gradient norm before clipping."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """The optimizer state, by ``<parameter>/<name>``: the tensors of now, or ``GatheredTensors``. All ranks call it."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``. All ranks call it."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's part of the optimizer state into CPU memory. Returns a function that restores it."""
        ...


@runtime_checkable
class MeasuresGradients(Protocol):
    """A stepper over sharded weights: their gradients exist only after a backward pass, and not in ``torch.autograd.grad``."""

    def gradient_norm(self, loss: Tensor) -> float:
        """The gradient norm of ``loss``. Clears all gradients, also those accumulated before."""
        ...


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, or all of a replicated one, with the same storage as ``tensor``."""
    detached = tensor.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local


class ReplicatedStepper:
    """AdamW over weights that are replicated on every rank.

    Losses are shares of one global loss, so gradients are summed over ranks, in one flat all-reduce per step. DDP does the same
    if all backward passes but the last run under ``no_sync``; unlike DDP this needs no list of the parameters that take part.

    Source: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101).
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
        self._nonfinite_loss = False
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, this rank's scalar share of the global loss."""
        # clamp passes a NaN on in the value but not in the gradient, so checking the gradient alone is not enough.
        self._nonfinite_loss = self._nonfinite_loss or not bool(torch.isfinite(loss))
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """Reduce over ranks, clip, take the optimizer step, clear the gradients. Returns the norm before clipping.

        Raises NonFiniteGradient if the loss or the norm is not finite; the weights are then unchanged.
        """
        if self.ranks.any(self._nonfinite_loss):
            self._nonfinite_loss = False
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                "the loss is not finite: the optimizer step was skipped. Lower learning_rate, and look at the last images in "
                "samples/ for what went wrong before"
            )
        self._reduce()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                f"the gradient norm is {norm.item()}: the optimizer step was skipped. Lower learning_rate, and look at the last "
                "images in samples/ for what went wrong before"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _reduce(self) -> None:
        if self.ranks.world == 1:
            return
        # A parameter without a gradient must keep None on all ranks: AdamW would apply weight decay to a zero gradient.
        touched = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in touched if parameter.grad is not None]
        flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(touched, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def state(self) -> Mapping[str, Tensor]:
        """The optimizer's tensors, by ``<parameter>/<name>``; empty before the first step."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``. Raises ValueError if it names a parameter that does not train here."""
        self.optimizer.state.clear()
        for name, tensor in state.items():
            parameter_name, key = name.rsplit("/", 1)
            if parameter_name not in self.parameters:
                raise ValueError(f"the checkpoint has optimizer state of {parameter_name}, which does not train in this run")
            parameter = self.parameters[parameter_name]
            # AdamW counts its steps on the CPU.
            self.optimizer.state[parameter][key] = tensor.clone() if key == "step" else self._restored(parameter, tensor)

    @torch.no_grad()
    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's part of the optimizer state into CPU memory. Returns a function that restores it."""
        kept = {
            parameter: {key: local_shard(value).to("cpu", copy=True) for key, value in entries.items()}
            for parameter, entries in self.optimizer.state.items()
        }

        def restore() -> None:
            for parameter in list(self.optimizer.state):
                if parameter not in kept:
                    del self.optimizer.state[parameter]
                    continue
                for key, value in self.optimizer.state[parameter].items():
                    local_shard(value).copy_(kept[parameter][key])

        return restore

    def _restored(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """The tensor that the optimizer stores for this moment in a checkpoint, on the parameter's device."""
        return tensor.to(parameter.device, copy=True)
