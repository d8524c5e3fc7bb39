"""The memory plan of a denoising policy's training on each GPU, computed before anything is loaded.

Weights, gradients and optimizer states follow from parameter counts and are exact. Activations of the update are an estimate;
``retouch.memory.images`` plans sampling. The CUDA context, fragmentation and NCCL's buffers are not counted: leave a tenth of the
memory free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from retouch.memory.sizes import build_meta, lora_count, parameter_count, stored_count
from retouch.models.shapes import Part, PartConfigs, Shape

Moments: TypeAlias = Literal["8bit", "cpu"] | None
"""How AdamW's two moments are stored: None is fp32 on the device."""
FREE_SHARE = 0.1
"""The share of a device's memory that must stay free, for the CUDA context, workspaces of kernels and fragmentation."""
PLAN_ERROR = 0.03
"""A rehearsal of the same recipe may need up to this share more memory than its plan. A plan that fits only without this share is
undecided."""
LORA_SHARE = 0.755
"""Activations that a block saves for the backward pass if only LoRA weights of the block's dtype are trained, as a share of those
that it saves if all weights are trained: a frozen layer saves no input for the gradient of its weight. Measured by rehearsing
Stable Diffusion 3.5 Medium."""


def fits(needed: int, memory: int) -> bool:
    """Whether ``needed`` bytes leave enough of the ``memory`` bytes of a device free."""
    return needed <= (1 - FREE_SHARE) * memory


def surely_fits(planned: int, memory: int) -> bool:
    """Whether a plan of ``planned`` bytes fits into ``memory`` bytes even if its error is ``PLAN_ERROR``."""
    return fits(int(planned * (1 + PLAN_ERROR)), memory)


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Rank of the LoRA weights, and the suffixes of the names of the linear layers that have them."""

    rank: int
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One row of a memory plan: ``bytes`` on each GPU. ``in_update``: they exist only during the update."""

    name: str
    bytes: int
    in_update: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one GPU at the peak of a training step: the sum of the permanent ``rows``, and the largest of the update (its
    rows together) and ``phases``, of which only one is active at a time."""

    rows: tuple[MemoryRow, ...]
    phases: tuple[MemoryRow, ...] = ()

    @property
    def total(self) -> int:
        """Peak bytes."""
        permanent = sum(row.bytes for row in self.rows if not row.in_update)
        update = sum(row.bytes for row in self.rows if row.in_update)
        return permanent + max(update, *(phase.bytes for phase in self.phases), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a denoising model is trained.

    ``lora``, ``adapter``: if both are None, all weights of the transformer are trained. ``adapter`` is the number of parameters of
    an IP-Adapter, whose frozen image encoder is one of the model's parts; ``projection`` of them are not sharded with "fsdp".
    ``rows``: velocities per microbatch. ``passes``: the forward passes that compute them one after the other. ``tokens``: tokens
    per sample, of latents, text and source images. ``dtype``: type of frozen weights and activations; ``trained_dtype``: of trained
    weights and their gradients. ``moments``: see ``moment_bytes``. ``copies``: the dtype of each further copy of the trained
    weights on the device (average, old policy, the reference of full fine-tuning). ``sharding``: "ddp" replicates everything on
    ``ranks`` GPUs, "zero2" shards gradients and optimizer state, "fsdp" also the transformer's weights. ``weights_on_cpu``: the
    weights that "fsdp" shards are in CPU memory while they are not used, with their gradients, moments and copies. ``without``:
    parts that are not on this GPU.

    Raises ValueError for counts below 1, and for types other than 16 or 32 bits.
    """

    lora: LoraShape | None
    adapter: int | None = None
    projection: int = 0
    rows: int
    passes: int = 1
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    trained_dtype: torch.dtype = torch.float32
    moments: Moments = None
    copies: Sequence[torch.dtype] = ()
    gradient_checkpointing: bool = True
    ranks: int = 1
    sharding: Literal["ddp", "zero2", "fsdp"] = "ddp"
    weights_on_cpu: bool = False
    without: Sequence[str] = ()

    def __post_init__(self) -> None:
        if min(self.rows, self.tokens, self.ranks) < 1:
            raise ValueError("rows, tokens and ranks must be at least 1")
        for dtype in (self.dtype, self.trained_dtype, *self.copies):
            if dtype.itemsize not in (2, 4):
                raise ValueError(f"{dtype}: dtype must have 16 or 32 bits")


def plan_parts(described: PartConfigs, setup: Setup, *, shape: Shape) -> MemoryPlan:
    """The memory plan of a model with the parts ``described``. ``shape``: the shape of its transformer.

    Raises ValueError for a name in ``setup.without`` that is not a part, and for a LoRA target without a layer.
    """
    unknown = [part for part in setup.without if part not in described or part == "transformer"]
    if unknown:
        raise ValueError(f"without: the model has no part {unknown[0]!r}; it has {', '.join(described)}")
    transformer = described["transformer"]
    share = setup.ranks if setup.sharding == "fsdp" else 1
    frozen = stored_count(transformer)
    trained = 0 if setup.lora is None else lora_count(transformer, rank=setup.lora.rank, targets=setup.lora.targets)
    if setup.adapter is not None:
        trained += setup.adapter
    elif setup.lora is None:
        trained = parameter_count(transformer)
        frozen -= trained
    whole = setup.projection if setup.sharding == "fsdp" else 0
    here = 0 if setup.weights_on_cpu else 1
    size = setup.trained_dtype.itemsize

    def of_trained(each: int) -> int:
        """Bytes on the device if every trained weight needs ``each`` bytes."""
        return here * _share((trained - whole) * each, share) + whole * each

    moments = here * _share(moment_bytes(trained - whole, setup.moments), 1 if setup.sharding == "ddp" else setup.ranks)
    rows = [
        MemoryRow("transformer, frozen weights", here * _share(frozen * setup.dtype.itemsize, share)),
        MemoryRow("transformer, trained weights", of_trained(size)),
        MemoryRow("gradients", of_trained(size), in_update=True),
        MemoryRow("AdamW's two moments", moments + moment_bytes(whole, setup.moments)),
        MemoryRow("copies of the trained weights", sum(of_trained(dtype.itemsize) for dtype in setup.copies)),
    ]
    if setup.sharding == "zero2":
        shares = _share(trained * (setup.trained_dtype.itemsize + 4), setup.ranks)
        rows.append(MemoryRow("ZeRO's shares of gradients and weights", shares))
        # The gradient of the largest layer exists in addition to DeepSpeed's bucket for all gradients.
        rows.append(MemoryRow("gradient of the projection", setup.projection * setup.trained_dtype.itemsize, in_update=True))
    elif setup.trained_dtype.itemsize < 4:
        rows.append(MemoryRow("fp32 master weights", of_trained(4)))
        rows.append(MemoryRow("fp32 gradients of the master weights", of_trained(4), in_update=True))
    if setup.sharding == "fsdp":
        rows.append(MemoryRow("two gathered blocks", 2 * _largest_block(transformer) * setup.dtype.itemsize))
    for part, description in described.items():
        if part != "transformer" and part not in setup.without:
            rows.append(MemoryRow(part, stored_count(description) * setup.dtype.itemsize))
    rows.append(MemoryRow("activations (estimate)", activation_bytes(shape, setup), in_update=True))
    return MemoryPlan(tuple(row for row in rows if row.bytes))


def moment_bytes(weights: int, moments: Moments, *, saved: bool = False) -> int:
    """Bytes of AdamW's two moments for this number of weights, on the device or in a checkpoint (``saved``).

    ``8bit`` stores a code for each number and an fp32 scale for each block of 256. Small tensors, whose
    moments stay fp32, are not counted separately.
    """
    if moments == "8bit":
        return math.ceil(weights * 2 * (1 + 4 / 256))
    return 0 if moments == "cpu" and not saved else 8 * weights


def activation_bytes(shape: Shape, setup: Setup) -> int:
    """Estimated bytes that autograd keeps of one forward pass.

    Without gradient checkpointing, these are all activations of every block; with it, the input of every block and all activations
    of one block in one forward pass (sublinear memory, Chen et al., arXiv 1604.06174).
    """
    size = setup.dtype.itemsize
    numbers = setup.rows * setup.tokens * shape.width
    if setup.gradient_checkpointing:
        block = max(each.saved[size] + each.backward * size for each in shape.blocks)
        return numbers * sum(each.count for each in shape.blocks) * size + math.ceil(numbers * block / setup.passes)
    share = LORA_SHARE if setup.lora is not None and setup.trained_dtype == setup.dtype else 1
    return int(numbers * sum(each.count * each.saved[size] for each in shape.blocks) * share)


def _largest_block(transformer: Part) -> int:
    module: Any = build_meta(transformer)
    blocks = [block for block in module.modules() if type(block).__name__ in (module._no_split_modules or ())]
    return max(sum(weight.numel() for weight in block.parameters()) for block in blocks)


def _share(total: int, ranks: int) -> int:
    return -(-total // ranks)
