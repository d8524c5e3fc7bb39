"""FSDP2 (torch's ``fully_shard``): weights, gradients and optimizer state are sharded over the ranks.

The weights of each block of the trained model are gathered when the block computes; the other weights of the model's forward are
gathered together. Submodules that are called separately, and possibly more often on one rank than on another, stay replicated: the
head and the embeddings of a language model, its vision tower, the projection of an IP-Adapter. All ranks must make the same number
of forward passes through the sharded modules; the policies ensure this.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from retouch.distributed.optimizer import NonFiniteGradient, ReplicatedStepper, fill_shards, gathered_state, local_shard
from retouch.distributed.ranks import Ranks
from retouch.models.parts import called_separately, sharded_root
from retouch.policies.weights import WeightCopies


def shard(module: nn.Module, ranks: Ranks, *, weights_on_cpu: bool = False) -> None:
    """Shard the blocks of a model over the ranks, in place. Add LoRA first. Raises ValueError if the blocks are unknown.

    ``weights_on_cpu``: keep this rank's shard of the weights in CPU memory (page-locked if the device is a GPU). The weights of a
    block are copied to the device when the block computes, its gradients are then copied to the CPU, and the optimizer runs on the
    CPU.

    Source: PyTorch FSDP (Zhao et al. 2023, arXiv 2304.11277) in its per-parameter form, ``fully_shard``.
    """
    root = sharded_root(module)
    named = getattr(module, "_no_split_modules", None) or ()
    blocks = [inner for inner in root.modules() if type(inner).__name__ in named]
    if not blocks:
        raise ValueError(f"sharding fsdp2: the blocks of {type(module).__name__} are unknown (no _no_split_modules); use zero2")
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    on_gpu = ranks.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if weights_on_cpu else OffloadPolicy()
    # Reshard after every forward, including the last: weights may be swapped between forwards and must then be gathered again.
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True, "offload_policy": policy}
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(root, **options, ignored_params=called_separately(module))
    if weights_on_cpu and on_gpu:
        # Copies from page-locked memory are asynchronous, and the host may write to the weights as soon as the forward returns.
        # After a backward pass, torch waits for the gradients itself.
        root.register_forward_hook(lambda *_: torch.cuda.synchronize(ranks.device))
    for inner in root.modules():
        if isinstance(inner, FSDPModule):
            # Losses are shares of one global loss, so gradients are summed, with an operation that every backend supports.
            inner.set_gradient_divide_factor(1.0)
            inner.set_force_sum_reduction_for_comms(True)


class FsdpStepper(ReplicatedStepper):
    """AdamW over sharded weights; call ``shard`` on the module first.

    ``state`` and ``load`` use unsharded tensors, so a run can resume with any number of ranks; ``state`` gathers one tensor at a
    time. All ranks must call them.

    Source: PyTorch FSDP (Zhao et al. 2023, arXiv 2304.11277).
    """

    def step(self, learning_rate: float) -> float:
        """Like ``ReplicatedStepper.step``."""
        nonfinite = self.ranks.any(self._nonfinite_loss)
        self._nonfinite_loss = False
        norm = self._reduced_norm()
        if nonfinite or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(f"the loss or its gradient is not finite (norm {norm})")
        if norm > self.max_grad_norm:
            for gradient in self._gradients():
                local_shard(gradient).mul_(self.max_grad_norm / (norm + 1e-6))
        self._step_optimizer(learning_rate)
        return norm

    def gradient_norm(self, loss: Tensor) -> float:
        """Return the gradient norm of ``loss``. Clears all gradients, including those accumulated before."""
        self.optimizer.zero_grad(set_to_none=True)
        self._accumulate(loss)
        norm = self._reduced_norm()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> Mapping[str, Tensor]:
        sharded = {f"{name}/{key}": weight for name, weight in self.weights.items() for key in ("exp_avg", "exp_avg_sq")}
        return gathered_state(super().state(), self.ranks, like=sharded)

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights.values() if weight.grad is not None]

    def _reduced_norm(self) -> float:
        """Sum the gradients of replicated weights over ranks, and return the norm of all gradients."""
        replicated = [gradient for gradient in self._gradients() if not isinstance(gradient, DTensor)]
        if replicated:
            flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in replicated]))
            for gradient, part in zip(replicated, torch.split(flat, [gradient.numel() for gradient in replicated]), strict=True):
                gradient.copy_(part.view_as(gradient))
        squares = [local_shard(each).float().square().sum().cpu() for each in self._gradients() if isinstance(each, DTensor)]
        sharded_sum = self.ranks.sum(torch.stack(squares).sum() if squares else torch.zeros(()))
        replicated_sum = sum((gradient.float().square().sum().cpu() for gradient in replicated), torch.zeros(()))
        return math.sqrt(float(sharded_sum + replicated_sum))


class ShardedCopies(WeightCopies):
    """Copies of sharded weights, with the same sharding.

    Sharded weights are swapped by copying values, because FSDP gathers from its own storage, which assigning a parameter's ``data``
    does not change. Replicated weights are swapped by assigning ``data``, because autograd may have saved them. ``state`` and
    ``load`` use full tensors; ``state`` gathers one tensor at a time. All ranks must call them.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(module)
        self.ranks = ranks

    @torch.no_grad()
    def update_ema(self, copy: str, decay: float) -> None:
        for name, parameter in self.parameters.items():
            average = local_shard(self.copies[copy][name])
            average.lerp_(local_shard(parameter).to(average.dtype), 1.0 - decay)

    @contextmanager
    def using(self, copy: str) -> Iterator[None]:
        shards = {name: local_shard(parameter) for name, parameter in self.parameters.items() if isinstance(parameter, DTensor)}
        current = {name: shard.clone() for name, shard in shards.items()}
        replicated = {name: parameter.data for name, parameter in self.parameters.items() if name not in shards}
        with torch.no_grad():
            for name, shard in shards.items():
                shard.copy_(local_shard(self.copies[copy][name]))
        for name in replicated:
            self.parameters[name].data = self.copies[copy][name].to(self.parameters[name].dtype)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, shard in shards.items():
                    shard.copy_(current[name])
            for name, data in replicated.items():
                self.parameters[name].data = data

    def state(self) -> Mapping[str, Tensor]:
        return gathered_state(super().state(), self.ranks)

    def load(self, state: Mapping[str, Tensor]) -> None:
        current = super().state()
        if state.keys() != current.keys():
            super().load(state)  # raises, with the names that differ
        for name, tensor in current.items():
            fill_shards(tensor, state[name])
