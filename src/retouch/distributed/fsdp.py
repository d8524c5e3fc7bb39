"""Weights, gradients and optimizer state spread over the ranks by FSDP2 (torch's ``fully_shard``).

The blocks of the trained model are gathered one by one when they compute, and what its forward holds beside them together. Parts
that are called by themselves, and perhaps more often on one rank than on another (the head and the embeddings of a language model,
its vision tower, the projection of an IP-Adapter), stay whole on every rank. Ranks must make equally many forwards of all the
rest, which the kernels see to.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from retouch.distributed.ranks import Ranks
from retouch.distributed.sharded_copies import fill, local, whole
from retouch.distributed.stepper import NonFiniteGradient, ReplicatedStepper


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
    called_alone = {weight for weight in _called_alone(module, root) if weight is not None}
    fully_shard(root, mesh=mesh, reshard_after_forward=True, ignored_params=called_alone)
    for inner in root.modules():
        if isinstance(inner, FSDPModule):
            # Losses are shares of one loss, so their sum is wanted, and by an operation that every backend has.
            inner.set_gradient_divide_factor(1.0)
            inner.set_force_sum_reduction_for_comms(True)


class FsdpStepper(ReplicatedStepper):
    """AdamW over shares of the weights; ``shard`` comes before.

    ``state`` and ``load`` deal in whole tensors and are called by all ranks; what some saved, any number of them may go on with.
    """

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
        return {name: whole(tensor) for name, tensor in super().state().items()}

    def _kept(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        if tensor.shape != parameter.shape:  # a count of steps
            return super()._kept(parameter, tensor)
        kept = torch.zeros_like(parameter)
        fill(kept, tensor)
        return kept

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


def _called_alone(module: nn.Module, root: nn.Module) -> list[nn.Parameter | None]:
    """A language model's embeddings; of a transformer, the projection of its IP-Adapter, which is called before it."""
    made: Any = module
    if root is module:
        return [weight for name, weight in module.named_parameters() if name.startswith("encoder_hid_proj.")]
    return [getattr(part, "weight", None) for part in (made.get_input_embeddings(), made.get_output_embeddings())]
