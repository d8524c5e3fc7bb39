"""Quantises frozen weights in 8 bits (torchao's int8, a scale per row) or 4 bits (bitsandbytes' NF4, double quantised).

The kernels of both compute with 16-bit or fp32 weights that exist only during a product, so equal shapes give equal bits. Not used:
bitsandbytes' int8 picks outliers over all rows of a batch, so that a log-probability depends on the other rows; SDNQ's forward pass
has no gradient; torchao's int4 has no adapters in PEFT.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.base import Bits

_LIBRARIES = {"8bit": "torchao", "4bit": "bitsandbytes"}
_BLOCK = 64
"""Weights of a row that share a scale in 4 bits."""


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in which a weight is stored: the codes and scales of a quantised weight, otherwise the weight."""
    if type(tensor).__module__.partition(".")[0] in ("torchao", "optimum"):  # a wrapper around tensors
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from plain_tensors(getattr(tensor, name))
        return
    yield tensor
    state = getattr(tensor, "quant_state", None)  # bitsandbytes: the parameter has the codes
    while state is not None:
        yield from (each for each in (state.absmax, state.offset) if each is not None)
        state = state.state2


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is stored as codes and scales."""
    return not weight.is_floating_point() or next(plain_tensors(weight)) is not weight


def compute_dtype(module: nn.Module) -> torch.dtype:
    """The dtype in which a module computes: that of its own weights, of which codes of quantised weights are not one.

    Weights of a LoRA may have another dtype, and are left out.
    """
    return next(weight.dtype for name, weight in module.named_parameters() if weight.is_floating_point() and "lora_" not in name)


def quantize(
    module: nn.Module, bits: Bits, *, device: torch.device, home: torch.device | None = None, key: str = "policy.base.quantize"
) -> None:
    """Quantise the linear layers of a module's blocks, one layer at a time on ``device``; the rest of the module stays where it is.

    ``home``: where the quantised layers are afterwards; by default on ``device``.

    Layers outside of its stacks of blocks are kept (embedders, the last norm and projection), and those that its class keeps in
    fp32. Raises ValueError, which names ``key``, if the module has no such layers.
    """
    kept = {*(getattr(module, "_keep_in_fp32_modules", None) or ())}
    chosen = {
        f"{stack}.{name}": layer
        for stack, blocks in module.named_modules()
        if type(blocks) is nn.ModuleList
        for name, layer in blocks.named_modules()
        if type(layer) is nn.Linear and not (layer.in_features % _BLOCK and bits == "4bit") and not kept & {*name.split(".")}
    }
    if not chosen:
        raise ValueError(f"{key}: a {type(module).__name__} has no blocks of linear layers that could be quantised; remove it")
    for path, layer in chosen.items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, quantized_layer(layer, bits, device=device).to(home or device))


def quantized_layer(layer: nn.Linear, bits: Bits, *, device: torch.device) -> nn.Module:
    """Return the layer with quantised weights, on ``device``. Raises ImportError if the library is not installed."""
    if bits == "8bit":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(layer.requires_grad_(False), Int8WeightOnlyConfig(set_inductor_config=False), device=device)
        return layer
    import bitsandbytes

    weight, bias = layer.weight, layer.bias
    made: Any = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=bias is not None, compute_dtype=weight.dtype, quant_type="nf4", device="meta"
    )
    settings = {"requires_grad": False, "quant_type": "nf4", "compress_statistics": True, "module": made}
    made.weight = bitsandbytes.nn.Params4bit(weight.data, **settings)
    made.bias = bias
    made.support_avx512bf16_for_cpu = False  # it would repack the weights in place, into a layout without gradient
    return made.to(device).requires_grad_(False)


def input_gradient_error(layer: Any, dtype: torch.dtype) -> float:
    """Return the relative error of the gradient with respect to the input of an affine layer; infinite if there is none.

    For the change v = f(x + d) - f(x) of an affine f with Jacobian J, |v|^2 = d . J^T v.
    """
    device, keyed = next(layer.parameters()).device, generator(0, "gradient through frozen layers")
    x, d = (torch.randn(4, layer.in_features, generator=keyed).to(device, dtype) for _ in range(2))
    with torch.no_grad():
        v = layer(x + d) - layer(x)
    with torch.enable_grad():
        y = layer(x.requires_grad_())
    found = torch.autograd.grad(y, x, v, allow_unused=True)[0] if y.requires_grad else None
    if found is None:
        return math.inf
    return abs(1 - (d.float() * found.float()).sum() / v.float().square().sum()).item()


def gradient_limit(dtype: torch.dtype) -> float:
    """The largest ``input_gradient_error`` that is rounding."""
    return 1e-3 if dtype == torch.float32 else 3e-2


def require_quantizer(bits: Bits, *, device: torch.device, dtype: str, key: str) -> None:
    """Raise ValueError, which names ``key``, if the library is missing, or if a layer cannot compute and train on the device."""
    kind, library = getattr(torch, dtype), _LIBRARIES[bits]
    try:
        layer = quantized_layer(nn.Linear(_BLOCK, _BLOCK, dtype=kind), bits, device=device)
        error = input_gradient_error(layer, kind)
        problem = None if error <= gradient_limit(kind) else f"the gradient of its layers is off by {error:.1e}"
    except ImportError as missing:
        raise ValueError(f"{key}: {bits} needs {library} ({missing}); install it: pip install 'retouch[quantized]'") from missing
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, AssertionError, OSError) as raised:
        problem = (str(raised).strip().splitlines() or [type(raised).__name__])[0]
    if problem is not None:
        other = {"8bit": "4bit", "4bit": "8bit"}[bits]
        raise ValueError(f"{key}: {library} cannot compute {bits} layers on {device}: {problem}; use {other}, or null")
