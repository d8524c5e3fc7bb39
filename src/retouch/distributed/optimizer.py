"""Optimizers of a run: they compute gradients, reduce them over ranks, clip them, and step AdamW.

Sharded state is gathered one tensor at a time, so a device holds one rank's part of one tensor. Every rank holds a contiguous
part of each tensor, in row-major order: some rows of a tensor that FSDP2 has sharded, or a slice of ZeRO's concatenated weights.
The moments of AdamW may be stored in 8 bits, in blocks with one scale each (2 bytes per weight), or in CPU memory.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from retouch.distributed.ranks import Ranks


@dataclass(frozen=True, eq=False)
class TensorShard:
    """This rank's part of a tensor.

    ``local``: the elements of the part, (counts[rank],). ``counts``: the number of elements on each rank. ``shape``: the shape of
    the full tensor.
    """

    local: Tensor
    counts: Sequence[int]
    shape: torch.Size
    ranks: Ranks

    def gather(self) -> Tensor:
        """Return the full tensor, in CPU memory. Every rank must call ``gather`` or ``send``."""
        whole = torch.empty(self.shape, dtype=self.local.dtype)
        pieces = whole.view(-1).split(list(self.counts))
        for piece, content in zip(pieces, self.ranks.parts(self.local, self.counts), strict=True):
            piece.copy_(content)
        return whole

    def send(self) -> None:
        """Take part in the ``gather`` of another rank, without a copy in this rank's CPU memory."""
        for _ in self.ranks.parts(self.local, self.counts):
            pass


class GatheredTensors(Mapping[str, Tensor]):
    """Tensors by name. Each read gathers the tensor's current values; the result is not kept, so a later read may differ.

    All ranks must read the same tensors in the same order. A rank that needs no values calls ``send_unread`` instead, if the other
    ranks read in the order of ``in_file_order``.
    """

    def __init__(self, tensors: Mapping[str, Tensor | TensorShard]) -> None:
        self.tensors = dict(tensors)
        self._unread = {name for name, tensor in tensors.items() if isinstance(tensor, TensorShard)}

    def __getitem__(self, name: str) -> Tensor:
        self._unread.discard(name)
        tensor = self.tensors[name]
        return tensor.gather() if isinstance(tensor, TensorShard) else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def send_unread(self) -> None:
        """Take part in the other ranks' gathers of every tensor that this rank has not read."""
        for name in in_file_order(self):
            part = self.tensors[name]
            if isinstance(part, TensorShard) and name in self._unread:
                part.send()
        self._unread.clear()


def ungathered(state: Mapping[str, Tensor]) -> Mapping[str, Tensor | TensorShard]:
    """Return the tensors of a state as this rank holds them, without gathering."""
    return state.tensors if isinstance(state, GatheredTensors) else state


def forms(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and full shape of every tensor, without gathering."""
    held = ungathered(state)
    return {name: ((each.local if isinstance(each, TensorShard) else each).dtype, each.shape) for name, each in held.items()}


def in_file_order(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names, those of the widest dtypes first, so that every tensor in a file is aligned."""
    found = forms(state)
    return sorted(found, key=lambda name: (-found[name][0].itemsize, str(found[name][0]), name))


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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, weight, gradient = self.state[parameter], self._local(parameter), self._local(parameter.grad).float()
                beta1, beta2 = group["betas"]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                        self._store(state, name, torch.zeros_like(weight), signed=signed)
                state["step"] += 1
                taken = state["step"].item()
                mean = self._read(state, "exp_avg", weight, signed=True).lerp_(gradient, 1 - beta1)
                square = self._read(state, "exp_avg_sq", weight, signed=False).mul_(beta2)
                square.addcmul_(gradient, gradient, value=1 - beta2)
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


MASTER = "master"
"""The key of fp32 master weights in the optimizer state."""
_HALF = (torch.bfloat16, torch.float16)


class NonFiniteGradient(ValueError):
    """The loss or its gradient is NaN or infinite; the optimizer step was skipped. ``what``: what is not finite, in words."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: the optimizer step was skipped. Lower learning_rate, and look at the last images in samples/ for what went "
            "wrong before"
        )


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
        """Return the optimizer state by ``<parameter>/<name>``: live tensors, or ``GatheredTensors``. All ranks must call it."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``. All ranks must call it."""
        ...

    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's part of the optimizer state into CPU memory. Returns a function that restores it."""
        ...


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or the whole of a replicated one. It shares storage with ``tensor``."""
    detached = tensor.detach()
    local: Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return local


def adamw(weights: Collection[Tensor], *, fused: bool, **options: Any) -> torch.optim.AdamW:
    """Return AdamW over ``weights``. ``fused``: update in one kernel; otherwise one kernel per operation (on the CPU, a loop)."""
    # On an accelerator, both variants take lists of weights, which must not mix sharded and replicated weights.
    groups: dict[bool, dict[str, Any]] = {}
    for weight in weights:
        groups.setdefault(hasattr(weight, "to_local"), {"params": []})["params"].append(weight)
    return torch.optim.AdamW(list(groups.values()), fused=True if fused else None, **options)


def step_count(count: Tensor, optimizer: torch.optim.Optimizer, weight: Tensor) -> Tensor:
    """Copy a stored step count to where the optimizer keeps it: the weight's device if it is fused, otherwise the CPU."""
    return count.to(weight.device if optimizer.param_groups[0].get("fused") else "cpu", copy=True)


class ReplicatedStepper:
    """AdamW over weights that are replicated on every rank.

    Losses are shares of one global loss, so gradients are summed over ranks, in one flat all-reduce per step. DDP does the same
    if all backward passes except the last run under ``no_sync``; unlike DDP, this stepper needs no list of unused parameters.

    Weights in 16 bits have fp32 master weights. The optimizer updates the master weights, which are then rounded to 16 bits:
    most updates of a bf16 weight are smaller than its rounding error. Gradients are accumulated, reduced and clipped in fp32.

    ``moments``: store the moments in 8 bits or in CPU memory (``StoredMomentsAdamW``); None: in fp32 on the device.

    Source: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); master weights (Micikevicius et al. 2018, arXiv 1710.03740).
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
        moments: Literal["8bit", "cpu"] | None = None,
        fused: bool | None = None,
    ) -> None:
        self.module = module
        self.ranks = ranks
        self.max_grad_norm = math.inf if max_grad_norm is None else max_grad_norm
        self.parameters: dict[str, nn.Parameter] = {}
        self.weights: dict[str, Tensor] = {}
        """The tensors that the optimizer updates: the parameters, or fp32 master weights of parameters in 16 bits."""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self.parameters[name] = parameter
                self.weights[name] = parameter.detach().float().requires_grad_() if parameter.dtype in _HALF else parameter
        self._nonfinite_loss = False
        self.moments = moments
        settings: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.optimizer: torch.optim.Optimizer
        if moments is not None:
            self.optimizer = StoredMomentsAdamW(self.weights.values(), moments=moments, local=local_shard, **settings)
        elif fused or ranks.device.type != "cpu":
            self.optimizer = adamw(self.weights.values(), fused=fused is not False, **settings)
        else:  # on the CPU, torch updates one weight after the other, so sharded and replicated weights may be mixed
            self.optimizer = torch.optim.AdamW(self.weights.values(), **settings)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, this rank's scalar share of the global loss."""
        # clamp propagates a NaN in its value but not in its gradient, so checking only the gradient is not enough.
        self._nonfinite_loss = self._nonfinite_loss or not bool(torch.isfinite(loss))
        self._accumulate(loss)

    def _accumulate(self, loss: Tensor) -> None:
        loss.backward()
        for name, weight in self.weights.items():
            parameter = self.parameters[name]
            if weight is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
                parameter.grad = None

    def step(self, learning_rate: float) -> float:
        """Reduce gradients over ranks, clip, take the optimizer step and clear gradients. Returns the norm before clipping.

        Raises NonFiniteGradient if the loss or the norm is not finite; the weights are then unchanged.
        """
        if self.ranks.any(self._nonfinite_loss):
            self._nonfinite_loss = False
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient("the loss is not finite")
        if self.ranks.world > 1:
            # A parameter without a gradient must keep None on all ranks: with a zero gradient, AdamW would apply weight decay.
            touched = [weight for weight in self.weights.values() if weight.grad is not None]
            gradients = [weight.grad for weight in touched if weight.grad is not None]
            flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for weight, part in zip(touched, parts, strict=True):
                weight.grad = part.view_as(weight)
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(f"the gradient norm is {norm.item()}")
        self._step_optimizer(learning_rate)
        return float(norm)

    @torch.no_grad()
    def _step_optimizer(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name, weight in self.weights.items():
            if weight is not self.parameters[name]:
                local_shard(self.parameters[name]).copy_(local_shard(weight))

    def state(self) -> Mapping[str, Tensor]:
        """Return the optimizer's tensors by ``<parameter>/<name>``; empty before the first step."""
        found: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            entries = self.optimizer.state.get(weight, {})
            found |= {f"{name}/{key}": value for key, value in entries.items()}
            if entries and weight is not self.parameters[name]:
                found[f"{name}/{MASTER}"] = weight.detach()
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``, also from a stepper with another sharding. Load the module's weights first.

        Raises ValueError if ``state`` contains a parameter that is not trained in this run.
        """
        self.optimizer.state.clear()
        for name, weight in self.weights.items():
            if weight is not self.parameters[name]:
                local_shard(weight).copy_(local_shard(self.parameters[name]))
        for name, tensor in state.items():
            parameter_name, key = name.rsplit("/", 1)
            if parameter_name not in self.parameters:
                raise ValueError(f"the checkpoint has optimizer state of {parameter_name}, which does not train in this run")
            weight = self.weights[parameter_name]
            if key == MASTER:
                if weight is not self.parameters[parameter_name]:
                    fill_shards(weight, tensor)
            elif key == "step":
                self.optimizer.state[weight][key] = step_count(tensor, self.optimizer, weight)
            elif key.endswith(("_codes", "_scales")):  # the tensors of 8-bit moments
                self.optimizer.state[weight][key] = tensor.to(weight.device, copy=True)
            else:
                moment = torch.empty_like(weight, requires_grad=False)
                fill_shards(moment, tensor)
                if self.moments == "cpu":  # where the optimizer stores moments
                    moment = local_shard(moment).cpu()
                self.optimizer.state[weight][key] = moment

    @torch.no_grad()
    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's part of the optimizer state into CPU memory. Returns a function that restores it."""
        kept = {
            weight: {key: local_shard(value).to("cpu", copy=True) for key, value in entries.items()}
            for weight, entries in self.optimizer.state.items()
        }
        masters = {
            name: local_shard(weight).to("cpu", copy=True)
            for name, weight in self.weights.items()
            if weight is not self.parameters[name]
        }

        def restore() -> None:
            for name, master in masters.items():
                local_shard(self.weights[name]).copy_(master)
            for weight in list(self.optimizer.state):
                if weight not in kept:
                    del self.optimizer.state[weight]
                    continue
                for key, value in self.optimizer.state[weight].items():
                    local_shard(value).copy_(kept[weight][key])

        return restore


class JointStepper:
    """The steppers of the policy and of a second module, which is replicated on every rank, as one (implements ``Stepper``).

    ``backward``, ``step`` and ``module`` are those of the policy: an image model's own training loop calls the second stepper, and
    ``HeadStepper`` calls that of a value head. ``state`` has the tensors of both, those of the second under ``prefix``, and there
    also ``weights``, which nothing else stores.
    """

    def __init__(self, policy: Stepper, second: ReplicatedStepper, *, prefix: str, weights: Mapping[str, Tensor]) -> None:
        self.module, self.policy, self.second = policy.module, policy, second
        self.prefix, self.weights = prefix, {f"weights/{name}": tensor for name, tensor in weights.items()}

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, this rank's share of the global loss."""
        self.policy.backward(loss)

    def step(self, learning_rate: float) -> float:
        """Like ``ReplicatedStepper.step``. The returned norm is the norm of the policy's gradient only."""
        return self.policy.step(learning_rate)

    def state(self) -> Mapping[str, Tensor]:
        """Return the states of both."""
        own = {f"{self.prefix}{name}": tensor for name, tensor in {**self.weights, **self.second.state()}.items()}
        return GatheredTensors({**ungathered(self.policy.state()), **own})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``."""
        own = {name.removeprefix(self.prefix): tensor for name, tensor in state.items() if name.startswith(self.prefix)}
        self.policy.load({name: tensor for name, tensor in state.items() if not name.startswith(self.prefix)})
        for name, tensor in self.weights.items():
            tensor.copy_(own.pop(name))
        self.second.load(own)

    def snapshot(self) -> Callable[[], None]:
        """Like ``ReplicatedStepper.snapshot``; includes ``weights``."""
        undo = self.policy.snapshot(), self.second.snapshot()
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights.items()}

        def restore() -> None:
            for each in undo:
                each()
            for name, tensor in self.weights.items():
                tensor.copy_(weights[name])

        return restore


class HeadStepper(JointStepper):
    """The steppers of the policy and of its value head.

    The head has a constant learning rate. Its weights are part of ``state``, because only training uses them; weight copies,
    exports and inference do not contain the head. ``loss_scale``: the factor by which the policy's stepper multiplies losses in its
    backward pass; the head's gradients are divided by it. The head is not wrapped.
    """

    def __init__(self, policy: Stepper, head: ReplicatedStepper, *, learning_rate: float, loss_scale: int = 1) -> None:
        super().__init__(policy, head, prefix="value_head/", weights=head.module.state_dict())
        self.learning_rate = learning_rate
        self.loss_scale = loss_scale

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, this rank's share of the global loss, to the policy and the head."""
        # The policy's loss may be NaN and the head's gradient finite.
        self.second._nonfinite_loss |= not bool(torch.isfinite(loss))
        self.policy.backward(loss)

    def step(self, learning_rate: float) -> float:
        """Like ``ReplicatedStepper.step``. The returned norm is the norm of the policy's gradient only. If that norm is not finite,
        the head has already moved: the run stops without a checkpoint of this step."""
        gradients = [parameter.grad for parameter in self.second.parameters.values() if parameter.grad is not None]
        if gradients:  # a phase without a value loss gives the head no gradient
            for gradient in gradients:
                gradient.div_(self.loss_scale)
            # The head steps first, so a non-finite loss changes neither the head nor the policy.
            self.second.step(self.learning_rate)
        return self.policy.step(learning_rate)


def gathered_state(state: Mapping[str, Tensor], ranks: Ranks, *, like: Mapping[str, Tensor] | None = None) -> GatheredTensors:
    """Return the tensors of ``state``, each gathered from its shards when it is read.

    ``like``: the sharded weights of plain tensors that hold this rank's shard (such as moments in CPU memory), by tensor name.
    """
    weights = {} if like is None else like
    found: dict[str, Tensor | TensorShard] = {}
    for name, tensor in state.items():
        whole = weights.get(name, tensor)
        if isinstance(whole, DTensor):
            each, total, width = _rows(whole, ranks.world), whole.shape[0], whole.shape[1:].numel()
            counts = [width * max(0, min(each, total - rank * each)) for rank in range(ranks.world)]
            found[name] = TensorShard(local_shard(tensor).reshape(-1), counts, whole.shape, ranks)
        else:
            found[name] = tensor.detach()
    return GatheredTensors(found)


@torch.no_grad()
def fill_shards(tensor: Tensor, content: Tensor) -> None:
    """Write the full tensor ``content`` into ``tensor``; each rank writes its own shard."""
    shard = local_shard(tensor)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        first = mesh.get_local_rank() * _rows(tensor, mesh.size())
        content = content[first : first + shard.shape[0]]
    shard.copy_(content)


def _rows(tensor: DTensor, world: int) -> int:
    """Return the number of rows per shard. FSDP2 splits like ``torch.chunk``: the last ranks may get fewer rows or none."""
    assert tuple(tensor.placements) == (Shard(0),), f"weights are sharded as {tensor.placements}"
    return -(-tensor.shape[0] // world)
