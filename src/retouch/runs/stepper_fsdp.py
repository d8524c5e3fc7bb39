"""Weights, gradients and optimizer state spread over the ranks by FSDP2 (torch's ``fully_shard``).

The blocks of the trained model are gathered one by one when they compute, and what its forward holds beside them together. Parts
that are called by themselves, and perhaps more often on one rank than on another (the head and the embeddings of a language model,
its vision tower), stay whole on every rank. Ranks must make equally many forwards of all the rest, which the kernels see to.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from retouch.runs.ranks import Ranks
from retouch.runs.sharded_copies import fill, local, whole
from retouch.runs.stepper import NonFiniteGradient


def shard(module: nn.Module, ranks: Ranks) -> None:
    """Spread a model's blocks over the ranks, in place; LoRA must be on it already. ValueError where its blocks are not known."""
    root = _root(module)
    named = getattr(module, "_no_split_modules", None) or ()
    blocks = [inner for inner in root.modules() if type(inner).__name__ in named]
    if not blocks:
        raise ValueError(f"sharding fsdp2: the blocks of {type(module).__name__} are not known here; take zero2")
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    # Resharded even after the last forward: weights are swapped between forwards, and gathered anew then.
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    called_alone = set() if root is module else {weight for weight in _embeddings(module) if weight is not None}
    fully_shard(root, mesh=mesh, reshard_after_forward=True, ignored_params=called_alone)
    for inner in root.modules():
        if isinstance(inner, FSDPModule):
            # Losses are shares of one loss, so their sum is wanted, and by an operation that every backend has.
            inner.set_gradient_divide_factor(1.0)
            inner.set_force_sum_reduction_for_comms(True)


class FsdpStepper:
    """AdamW over shares of the weights (implements ``retouch.runs.stepper.Stepper``); ``shard`` comes before."""

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
        self._strayed = self._strayed or not bool(torch.isfinite(loss))
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, learning_rate: float) -> float:
        """As ``ReplicatedStepper.step``."""
        strayed = self.ranks.any(self._strayed)
        self._strayed = False
        norm = self._reduced_norm()
        if strayed or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(
                f"the loss or its gradient is not finite (its norm is {norm}): no step was taken. Lower learning_rate, and look at "
                "the last pictures in samples/ for what went wrong before"
            )
        if norm > self.max_grad_norm:
            for gradient in self._gradients():
                local(gradient).mul_(self.max_grad_norm / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def norm_of(self, loss: Tensor) -> float:
        """The norm of this loss's gradient, of which nothing is kept; what has been added up before is lost."""
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self._reduced_norm()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, whole, by ``<parameter>/<name>``; empty before the first step. All ranks call it."""
        return {
            f"{name}/{key}": whole(value)
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave, on this number of ranks or another."""
        self.optimizer.state.clear()
        for name, tensor in state.items():
            parameter_name, key = name.rsplit("/", 1)
            if parameter_name not in self.parameters:
                raise ValueError(f"the checkpoint's optimizer knows {parameter_name}, which does not train in this run")
            parameter = self.parameters[parameter_name]
            if tensor.shape == parameter.shape:
                kept = torch.zeros_like(parameter)
                fill(kept, tensor)
            else:
                kept = tensor.clone()
            self.optimizer.state[parameter][key] = kept

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def _reduced_norm(self) -> float:
        """Add the gradients of weights that are whole on every rank, and take the norm of all of them."""
        alone = [gradient for gradient in self._gradients() if not isinstance(gradient, DTensor)]
        if alone:
            flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in alone]))
            for gradient, part in zip(alone, torch.split(flat, [gradient.numel() for gradient in alone]), strict=True):
                gradient.copy_(part.view_as(gradient))
        squares = [local(each).float().square().sum().cpu() for each in self._gradients() if isinstance(each, DTensor)]
        shared = self.ranks.sum(torch.stack(squares).sum() if squares else torch.zeros(()))
        own = sum((gradient.float().square().sum().cpu() for gradient in alone), torch.zeros(()))
        return math.sqrt(float(shared + own))


def _root(module: nn.Module) -> nn.Module:
    """What is called as a whole, with all blocks in it: a language model's decoder, else the module."""
    inner: Any = module
    if hasattr(module, "get_output_embeddings") and hasattr(module, "model"):
        inner = getattr(module.model, "language_model", module.model)
    found: nn.Module = inner
    return found


def _embeddings(module: nn.Module) -> list[nn.Parameter | None]:
    made: Any = module
    return [getattr(part, "weight", None) for part in (made.get_input_embeddings(), made.get_output_embeddings())]
