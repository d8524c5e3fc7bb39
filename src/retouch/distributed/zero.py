"""Optimizer state and gradients spread over the ranks by DeepSpeed's ZeRO-2; every rank still holds all weights.

DeepSpeed is given what trains and every loss, and nothing of the model: ZeRO-2 changes no forward. Its state is handed out whole,
in the form of ``ReplicatedStepper``, so that a run may go on with another stepper or another number of ranks.
"""

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import NonFiniteGradient

_MASTER = "master"  # the weights in fp32, where they train in 16 bits
_engines: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()


class _Losses(nn.Module):
    """What DeepSpeed takes for the model: what trains, and a forward that hands each loss on, so that it sees each backward."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(trained.values())

    def forward(self, loss: Tensor) -> Tensor:
        return loss * 1.0


class ZeroStepper:
    """AdamW over the ranks' shares (implements ``retouch.distributed.stepper.Stepper``). Every rank makes equally many backwards.

    A parameter that took no part counts as one with a gradient of 0, which weight decay shrinks all the same. ValueError where
    DeepSpeed is not installed, or where what trains is in fp16.
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
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        if not dtypes <= {torch.float32} and not dtypes <= {torch.bfloat16}:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"sharding zero2: what trains is in {listed}; take float32 or bfloat16 for all of it")
        self._strayed = False
        # The hooks of an earlier engine would reduce every gradient a second time.
        if (earlier := _engines.pop(module, None)) is not None:
            earlier.destroy()
        weights = list(self.parameters.values())
        optimizer = torch.optim.AdamW(weights, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay)
        config = {
            # Sizes that it wants to know, of batches that it never sees.
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": sum(weight.numel() for weight in weights)},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0 if max_grad_norm is None else max_grad_norm,
            "bf16": {"enabled": dtypes == {torch.bfloat16}},
        }
        deepspeed = _deepspeed(ranks.device)
        model = _Losses(self.parameters)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        _engines[module] = self.engine

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share."""
        self._strayed = self._strayed or not bool(torch.isfinite(loss))
        # It takes means over ranks, and these are shares of one loss, so their sum is wanted.
        self.engine.backward(self.engine(loss * self.ranks.world))

    def step(self, learning_rate: float) -> float:
        """As ``ReplicatedStepper.step``."""
        strayed = self.ranks.any(self._strayed)
        self._strayed = False
        if strayed:
            # A gradient that is no number anywhere is how DeepSpeed is told to forget this step.
            self.engine.backward(self.engine(math.nan * sum(weight.float().sum() for weight in self.parameters.values())))
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        if strayed or self._zero.overflow:
            raise NonFiniteGradient(
                "the loss or its gradient is not finite: no step was taken. Lower learning_rate, and look at the last pictures in "
                "samples/ for what went wrong before"
            )
        return float(self.engine.get_global_grad_norm())

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors, whole, by ``<parameter>/<name>``, on the CPU; empty before the first step. All ranks call it."""
        flat = self._flat
        kept = self._zero.optimizer.state.get(flat, {})
        shares = {key: value for key, value in kept.items() if value.shape == flat.shape}
        if shares and flat.dtype != next(iter(self.parameters.values())).dtype:
            shares[_MASTER] = flat.detach()
        found = {key: self._parts(self.ranks.gather(share)) for key, share in shares.items()}
        state = {f"{name}/{key}": parts[name] for key, parts in found.items() for name in self.parameters}
        singles = {key: value for key, value in kept.items() if value.shape != flat.shape}
        return state | {f"{name}/{key}": value.detach().cpu() for key, value in singles.items() for name in self.parameters}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave, on this rank and number of ranks or others; the weights are those of the module now."""
        self._zero.refresh_fp32_params()
        self._zero.optimizer.state.clear()
        by_key: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            parameter, key = name.rsplit("/", 1)
            if parameter not in self.parameters:
                raise ValueError(f"the checkpoint's optimizer knows {parameter}, which does not train in this run")
            by_key.setdefault(key, {})[parameter] = tensor
        for key, tensors in by_key.items():
            first = next(iter(tensors.values()))
            if key == _MASTER:
                self._flat.data.copy_(self._share(tensors))
            else:
                self._zero.optimizer.state[self._flat][key] = first.clone() if first.dim() == 0 else self._share(tensors)

    @property
    def _zero(self) -> Any:
        return self.engine.optimizer

    @property
    def _flat(self) -> Tensor:
        """This rank's share of all that trains, one after the other, in fp32."""
        (share,) = self._zero.single_partition_of_fp32_groups
        flat: Tensor = share
        return flat

    def _parts(self, whole: Tensor) -> dict[str, Tensor]:
        """All ranks' shares, joined, as what they are of."""
        sizes = [parameter.numel() for parameter in self.parameters.values()]
        pieces = torch.split(whole[: sum(sizes)], sizes)  # what is left over fills up the last share
        shapes = [parameter.shape for parameter in self.parameters.values()]
        return {name: piece.view(shape) for name, piece, shape in zip(self.parameters, pieces, shapes, strict=True)}

    def _share(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """This rank's share of them; 0 for a parameter that has none."""
        flat = self._flat
        whole = torch.zeros(flat.numel() * self.ranks.world, dtype=flat.dtype)
        for name, piece in self._parts(whole).items():
            if name in tensors:
                piece.copy_(tensors[name])
        return whole.chunk(self.ranks.world)[self.ranks.rank].to(flat.device)


def require_deepspeed() -> None:
    """ValueError where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("sharding zero2 needs DeepSpeed: pip install 'retouch[deepspeed]', or take fsdp2, which comes with torch")


def _deepspeed(device: torch.device) -> Any:
    require_deepspeed()
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")  # slow, and talkative
    if device.type == "cpu":
        # Its shared memory between CPU ranks would first have to be compiled; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
