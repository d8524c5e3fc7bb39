"""DeepSpeed ZeRO-2: optimizer state and gradients are sharded over the ranks; every rank still holds all weights.

ZeRO-2 does not change the forward pass, so DeepSpeed receives the trainable parameters and every loss, but not the model. The
optimizer state is saved unsharded in the format of ``ReplicatedStepper``, so a run can resume with another stepper or number of
ranks.
"""

import importlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retouch.distributed.optimizer import MASTER, GatheredTensors, NonFiniteGradient, TensorShard, adamw, step_count
from retouch.distributed.ranks import Ranks, require_deepspeed

_engines: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()


class _Losses(nn.Module):
    """The module for DeepSpeed. It holds the trainable parameters; its forward returns the loss, so DeepSpeed sees every loss."""

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.trained = nn.ParameterList(trained.values())

    def forward(self, loss: Tensor) -> Tensor:
        return loss * 1.0


class ZeroStepper:
    """AdamW over sharded optimizer state (implements ``retouch.distributed.optimizer.Stepper``).

    All ranks must make the same number of backward passes. A parameter without a gradient is treated as one with gradient 0, to
    which weight decay still applies. Raises ValueError if DeepSpeed is not installed, or if trainable parameters are neither all
    float32 nor all bfloat16.

    Source: ZeRO stage 2 (Rajbhandari et al. 2020, arXiv 1910.02054), by DeepSpeed.
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
        fused: bool | None = None,
    ) -> None:
        self.module = module
        self.ranks = ranks
        self.parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        if not dtypes <= {torch.float32} and not dtypes <= {torch.bfloat16}:
            listed = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"sharding zero2: trainable parameters are in {listed}; use float32 or bfloat16 for all of them")
        self._nonfinite_loss = False
        # The hooks of an earlier engine on the same module would reduce every gradient twice.
        if (earlier := _engines.pop(module, None)) is not None:
            earlier.destroy()
        weights = list(self.parameters.values())
        accelerated = ranks.device.type != "cpu"
        fused = accelerated if fused is None else fused
        optimizer = adamw(weights, fused=fused, lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay)
        config = {
            # DeepSpeed requires batch sizes, although it never sees a batch.
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
        """Add the gradient of ``loss``, this rank's scalar share of the global loss."""
        self._nonfinite_loss = self._nonfinite_loss or not bool(torch.isfinite(loss))
        # DeepSpeed averages over ranks, but the losses are shares of one global loss and must be summed.
        self.engine.backward(self.engine(loss * self.ranks.world))

    def step(self, learning_rate: float) -> float:
        """Like ``ReplicatedStepper.step``."""
        nonfinite = self.ranks.any(self._nonfinite_loss)
        self._nonfinite_loss = False
        if nonfinite:
            # A NaN gradient makes DeepSpeed discard the accumulated gradients and skip this step.
            self.engine.backward(self.engine(math.nan * sum(weight.float().sum() for weight in self.parameters.values())))
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        if nonfinite or self._zero.overflow:
            raise NonFiniteGradient("the loss or its gradient is not finite")
        return float(self.engine.get_global_grad_norm())

    def state(self) -> Mapping[str, Tensor]:
        """Return the unsharded optimizer tensors by ``<parameter>/<name>``, gathered one at a time when they are read.

        Empty before the first step. All ranks must call it.
        """
        flat = self._flat
        kept = self._zero.optimizer.state.get(flat, {})
        shares = {key: value for key, value in kept.items() if value.shape == flat.shape}
        if shares and flat.dtype != next(iter(self.parameters.values())).dtype:
            shares[MASTER] = flat.detach()
        singles = {key: value.detach().cpu() for key, value in kept.items() if value.shape != flat.shape}
        state: dict[str, Tensor | TensorShard] = {}
        for name, (first, last) in self._ranges().items():
            places = [self._within(rank, first, last) for rank in range(self.ranks.world)]
            counts, shape = [place.stop - place.start for place in places], self.parameters[name].shape
            for key, share in shares.items():
                state[f"{name}/{key}"] = TensorShard(share.detach()[places[self.ranks.rank]], counts, shape, self.ranks)
            state |= {f"{name}/{key}": value for key, value in singles.items()}
        return GatheredTensors(state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``, from any number of ranks. Load the module's weights first. All ranks must call it."""
        self._zero.refresh_fp32_params()
        self._zero.optimizer.state.clear()
        by_key: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            parameter, key = name.rsplit("/", 1)
            if parameter not in self.parameters:
                raise ValueError(f"the checkpoint has optimizer state of {parameter}, which does not train in this run")
            by_key.setdefault(key, {})[parameter] = tensor
        for key, tensors in by_key.items():
            first = next(iter(tensors.values()))
            if key == MASTER:
                # A weight that never had a gradient has no master weight in the checkpoint of another stepper: it keeps its value.
                self._fill(self._flat.data, tensors)
            else:
                optimizer = self._zero.optimizer
                count = step_count(first, optimizer, self._flat) if first.dim() == 0 else None
                optimizer.state[self._flat][key] = self._fill(torch.zeros_like(self._flat), tensors) if count is None else count

    @torch.no_grad()
    def snapshot(self) -> Callable[[], None]:
        """Like ``ReplicatedStepper.snapshot``: copies this rank's shard of the moments and the fp32 weights."""
        share = self._flat.to("cpu", copy=True)
        kept = {key: value.to("cpu", copy=True) for key, value in self._zero.optimizer.state.get(self._flat, {}).items()}

        def restore() -> None:
            self._flat.data.copy_(share)
            if not kept:
                self._zero.optimizer.state.clear()
            for key, value in kept.items():
                self._zero.optimizer.state[self._flat][key].copy_(value)

        return restore

    @property
    def _zero(self) -> Any:
        return self.engine.optimizer

    @property
    def _flat(self) -> Tensor:
        """This rank's shard of all trainable weights, concatenated, in fp32."""
        (share,) = self._zero.single_partition_of_fp32_groups
        flat: Tensor = share
        return flat

    def _ranges(self) -> dict[str, tuple[int, int]]:
        """The begin and end of each parameter in the concatenated shards of all ranks; the last shard may end with padding."""
        ends = list(itertools.accumulate(parameter.numel() for parameter in self.parameters.values()))
        return dict(zip(self.parameters, itertools.pairwise([0, *ends]), strict=True))

    def _within(self, rank: int, first: int, last: int) -> slice:
        """Return the slice of a rank's shard that overlaps the elements ``first`` to ``last`` of the concatenated shards."""
        size = self._flat.numel()
        begin, end = (min(max(at - rank * size, 0), size) for at in (first, last))
        return slice(begin, end)

    def _fill(self, shard: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Write this rank's parts of ``tensors`` into ``shard``, and return it. Parameters not in ``tensors`` keep their values."""
        for name, (first, last) in self._ranges().items():
            place = self._within(self.ranks.rank, first, last)
            if name in tensors and place.stop > place.start:
                begin = place.start + self.ranks.rank * shard.numel() - first
                shard[place] = tensors[name].reshape(-1)[begin : begin + place.stop - place.start].to(shard.device)
        return shard


def _deepspeed(device: torch.device) -> Any:
    require_deepspeed()
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed = importlib.import_module("deepspeed")  # a slow import that logs a lot
    if device.type == "cpu":
        # Shared-memory communication between CPU ranks would have to be compiled first; gloo works without it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
