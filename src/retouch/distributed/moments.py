"""AdamW that stores its two moments in less device memory than fp32, which takes 8 bytes per trained weight.

The moments are stored in 8 bits, in blocks with one scale each (2 bytes per weight), or in CPU memory, from which they are copied
to the device one weight at a time.

Source of the 8-bit format: Block-wise Quantization (Dettmers et al. 2022, arXiv 2110.02861): blocks, a dynamic map of 256 values,
and fp32 for small tensors.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

BLOCK = 256
SMALLEST = 4096
"""Tensors with fewer elements keep their moments in fp32."""
_EXPONENTS = 7


@cache
def dynamic_map(*, signed: bool) -> Tensor:
    """Return the 256 values of the codes, ascending, from -1 (or 0) to 1: seven decades, with more values in larger decades."""
    bits = 7 if signed else 8
    found = [0.0, 1.0]
    for exponent in range(_EXPONENTS):
        count = 2 ** (exponent + bits - _EXPONENTS) if signed else 2**exponent * 2
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        values = (10.0 ** (exponent - _EXPONENTS + 1) * (edges[:-1] + edges[1:]) / 2).tolist()
        found += [*values, *(-value for value in values)] if signed else values
    return torch.tensor(sorted(found), dtype=torch.float32)


def quantise(x: Float[Tensor, "..."], *, signed: bool) -> tuple[UInt8[Tensor, " n"], Float[Tensor, " blocks"]]:
    """Quantise ``x`` to 8 bits. Returns the codes and the scales.

    A scale is the largest magnitude of a block; a code is the index of the map's value nearest to element / scale. ``n``: the
    number of elements, rounded up to whole blocks.
    """
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(dim=1)
    values = dynamic_map(signed=signed).to(x.device)
    scaled = flat / torch.where(scales == 0, 1.0, scales)[:, None]
    codes = torch.bucketize(scaled, (values[:-1] + values[1:]) / 2)
    return codes.to(torch.uint8).flatten(), scales


def dequantise(codes: UInt8[Tensor, " n"], scales: Float[Tensor, " blocks"], like: Tensor, *, signed: bool) -> Tensor:
    """Return the fp32 values of the codes and scales of ``quantise``, in the shape of ``like``."""
    values = dynamic_map(signed=signed).to(codes.device)[codes.long()].view(-1, BLOCK) * scales[:, None]
    return values.flatten()[: like.numel()].view(like.shape)


class StoredMomentsAdamW(torch.optim.Optimizer):
    """AdamW with ``moments`` in 8 bits or in CPU memory; the update is the same as torch's, in fp32.

    ``local``: returns this rank's shard of a sharded tensor, with the same storage. With 8 bits, tensors with fewer than
    ``SMALLEST`` elements keep fp32 moments.

    Source: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); 8 bits (Dettmers et al. 2022, arXiv 2110.02861); CPU memory
    (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840).
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: Literal["8bit", "cpu"],
        local: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.moments = moments
        self._local = local

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one optimizer step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(self.state[weight], self._local(weight), self._local(weight.grad).float(), group)

    def _update(self, state: dict[str, Tensor], weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                self._store(state, name, torch.zeros_like(weight), signed=signed)
        state["step"] += 1
        taken = state["step"].item()
        mean = self._read(state, "exp_avg", weight, signed=True).lerp_(gradient, 1 - beta1)
        square = self._read(state, "exp_avg_sq", weight, signed=False).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        root = (square.sqrt() / (1 - beta2**taken) ** 0.5).add_(group["eps"])
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**taken))
        self._store(state, "exp_avg", mean, signed=True)
        self._store(state, "exp_avg_sq", square, signed=False)

    def _store(self, state: dict[str, Tensor], name: str, moment: Tensor, *, signed: bool) -> None:
        if self.moments == "cpu":
            state[name] = state[name].copy_(moment) if name in state else moment.to("cpu")
        elif moment.numel() < SMALLEST:
            state[name] = moment
        else:
            state.pop(name, None)  # an fp32 moment from a checkpoint
            state[f"{name}_codes"], state[f"{name}_scales"] = quantise(moment, signed=signed)

    def _read(self, state: dict[str, Tensor], name: str, weight: Tensor, *, signed: bool) -> Tensor:
        """Return the moment in fp32, on the weight's device."""
        if name in state:
            return state[name].to(weight.device)
        return dequantise(state[f"{name}_codes"], state[f"{name}_scales"], weight, signed=signed)
