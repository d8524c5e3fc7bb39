"""Sets the attention backend of diffusers models, checkpoints and compiles the repeated blocks of a model."""

import inspect
import logging
import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from retouch.config.consent import user_folder
from retouch.models.parts import repeated_blocks, to_device

log = logging.getLogger("retouch")

KEY = "policy.attention"
_TOKENS, _HEADS, _WIDTH = 64, 2, 64
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_GRAPHS, _GRAPH_FOLDER = 64, "TORCHINDUCTOR_CACHE_DIR"
_RARE = 8
"""A structure is compiled if at least one of this number of blocks has it."""


def trains_with(name: str, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a model in ``dtype`` on ``device`` cannot train with a diffusers attention backend; None if it can.

    The backend computes attention between a few random tokens: its output and gradients must equal those of torch's own attention
    up to the rounding of ``dtype``. So backends for inference only (without gradients, or in 8 bits) are rejected. Kernels from the
    Hugging Face Hub are downloaded.
    """
    if name not in {each.value for each in AttentionBackendName}:
        return "diffusers has no such backend"
    try:
        made = _attend(AttentionBackendName(name), device=device, dtype=dtype)
    # Each backend raises its own exceptions for a missing package, a wrong device and a wrong dtype.
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, AssertionError, OSError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    expected = _attend(AttentionBackendName.NATIVE, device=device, dtype=dtype)
    for what, one, other in zip(("output", "gradient", "gradient", "gradient"), made, expected, strict=True):
        if one is None or other is None:
            return "it has no gradient"
        apart = float((one - other).abs().max() / other.abs().max())
        if not apart < _TOLERANCE[dtype]:
            return f"its {what} differs from that of torch by {apart:.0%}"
    return None


def _attend(backend: AttentionBackendName, *, device: torch.device, dtype: torch.dtype) -> list[Tensor | None]:
    """Compute attention between a few random tokens; return the output and its gradients for queries, keys and values.

    A gradient is None if the backend does not compute it.
    """
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(1, _TOKENS, _HEADS, _WIDTH, generator=generator) for _ in range(4)]
    inputs = [draw.to(device, dtype).requires_grad_() for draw in draws[:3]]
    with attention_backend(backend):
        output = dispatch_attention_fn(*inputs)
    if not output.requires_grad:
        return [output, None, None, None]
    gradients = torch.autograd.grad(output, inputs, draws[3].to(device, dtype), allow_unused=True)
    return [None if each is None else each.detach().float() for each in (output, *gradients)]


def require_backend(name: str, *, device: torch.device, dtype: str) -> None:
    """Raise ValueError if a model cannot train with this diffusers attention backend; the message lists the backends that work."""
    check = partial(trains_with, device=device, dtype=getattr(torch, dtype))
    if (reason := check(name)) is None:
        return
    others = [each.value for each in AttentionBackendName if not each.value.endswith("_hub")]  # these are downloaded
    usable = ", ".join(each for each in others if check(each) is None)
    raise ValueError(f"{KEY}: {name} cannot train a model in {dtype} on {device}: {reason}. Use one of {usable}, or null")


def keep_graphs() -> str:
    """Keep compiled graphs in the user's cache folder, unless the user chose another than torch's, which is lost at a restart."""
    user, chosen = user_folder("XDG_CACHE_HOME", ".cache"), os.environ.get(_GRAPH_FOLDER, default_cache_dir())
    if user and chosen == default_cache_dir():  # imports of torchao set the variable to the default
        os.environ[_GRAPH_FOLDER] = chosen = str(user / "torchinductor")
    return chosen


def require_compiler(device: torch.device) -> None:
    """Raise ValueError if torch.compile does not work on the device: it needs a C++ compiler, and on a GPU Triton."""
    keep_graphs()
    x = torch.ones(8, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: (2 * x).sin(), dynamic=True)(x).sum().backward()
    except (RuntimeError, OSError, ImportError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"policy.compile: torch.compile does not work on {device}: {lines[0]}. Install a C++ compiler (and Triton for a GPU), "
            "or use null"
        ) from error


def set_attention(module: nn.Module, name: str) -> None:
    """Set the attention backend of a diffusers transformer. Other models in this process keep their backend.

    Raises ValueError if the model does not support attention backends.
    """
    processors = [each.processor for each in module.modules() if hasattr(each, "processor")]
    if not isinstance(module, ModelMixin) or not any(hasattr(each, "_attention_backend") for each in processors):
        raise ValueError(
            f"{KEY}: {type(module).__name__} does not support attention backends; use null: torch then chooses its fastest kernel"
        )
    # set_attention_backend also changes the default backend, which all models without a setting use; the context restores it.
    with attention_backend(AttentionBackendName(name)):
        module.set_attention_backend(name)


def checkpoint_in_cpu_memory(function: Callable[..., Any], *args: Any) -> Any:
    """Gradient checkpointing of a block, whose inputs are in CPU memory from the forward to the backward pass."""

    def pack(tensor: Tensor) -> tuple[Tensor, torch.device]:
        # From a GPU, the copy goes to page-locked memory without a wait of the host, which must not read it.
        return tensor.to("cpu", non_blocking=tensor.device.type not in ("cpu", "mps"), copy=True), tensor.device

    def unpack(kept: tuple[Tensor, torch.device]) -> Tensor:
        return to_device(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return checkpoint(function, *args, use_reentrant=False)


def compile_blocks(module: nn.Module, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile the repeated blocks of a transformer, or the decoder layers of a language model; equal blocks share one graph.

    Only the ``forward`` of a block is compiled. So the names of weights, checkpoints and exports do not change, and the hooks for
    sharding and gradient checkpointing around a block still work. Sampling runs the same graph as the update, with gradient, and
    then drops the tensors that are saved for the backward pass: a graph without gradient rounds differently, and the ratio would
    not be 1. For the same reason sizes are symbolic: one graph serves all batches of two rows or more, and a second one those of
    one row. Layers of a language model that are called with a KV cache (in decoding and for shared prompts) are not compiled, nor
    are blocks of a structure that few blocks have: a graph costs more than they gain. Raises ValueError if the blocks are unknown.

    Source: regional compilation, PyTorch's recipe and diffusers' ``compile_repeated_blocks``.
    """
    blocks = repeated_blocks(module)
    if not blocks:
        raise ValueError(f"policy.compile: the repeated blocks of {type(module).__name__} are unknown; use null")
    log.info("policy.compile: the first passes compile the blocks, which takes minutes, or read them from %s", keep_graphs())
    # For the whole process. All blocks of a class share one list of graphs, in which each structure and attention backend has one.
    # Sizes that are equal in the first batch may differ later, and PEFT's scale is a constant, for which torch would start again.
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    torch.fx.experimental._config.use_duck_shape, torch._dynamo.config.specialize_float = False, True
    inside = {weight for block in blocks for weight in block.parameters()}
    trained = any(weight.requires_grad and weight not in inside for weight in module.parameters())
    dims = (2, 3) if trained else (3,)
    compiled = {kind: _compiled(kind.forward, backend, dims=dims) for kind in {type(block) for block in blocks}}
    structures = [(type(block), *block.state_dict()) for block in blocks]
    for block, structure in zip(blocks, structures, strict=True):
        if structures.count(structure) * _RARE >= len(blocks):
            block.forward = partial(compiled[type(block)], block)


def _compiled(forward: Callable[..., Any], backend: str | Callable[..., Any], *, dims: tuple[int, ...]) -> Callable[..., Any]:
    """``dims``: the dimensions of inputs that have a gradient in some blocks of an update, so they have one in all calls."""

    def block(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(Tensor, Tensor.contiguous, forward(*args, **kwargs))

    def alike(value: Any) -> Any:
        # Each block gets what the blocks before it return in an update: contiguous, not a view, with gradient.
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad:
            return value.clone(memory_format=torch.contiguous_format) if value._is_view() or not value.is_contiguous() else value
        return value.data.contiguous().requires_grad_(value.ndim in dims and value.is_floating_point())

    graph: Callable[..., Any] = torch.compile(block, backend=backend, dynamic=True)
    signature = inspect.signature(forward)

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return forward(*args, **kwargs)
        given = signature.bind(*args, **kwargs)  # gradient checkpointing passes by position what other calls pass by name
        given.apply_defaults()
        with torch.enable_grad():
            made = graph(*map(alike, given.args), **{name: alike(value) for name, value in given.kwargs.items()})
        return made if torch.is_grad_enabled() else tree_map_only(Tensor, Tensor.detach, made)

    return call
