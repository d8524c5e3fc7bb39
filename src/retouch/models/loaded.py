"""Models that a script has already loaded: the parts of a diffusers pipeline, in the form in which ``parts.load_parts`` returns the
parts of a folder, and a transformers language model with its tokenizer.

A script may have changed anything about a loaded pipeline. ``require_as_built`` compares it with a pipeline that its class builds
from the configurations of its parts: ``TAKEN_OVER`` and ``HARMLESS`` list what may differ, and every other difference is an error.
"""

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, ModelMixin
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, Qwen2VLImageProcessorPil

from retouch.config import wings
from retouch.models.lora import own_layers, remove_lora
from retouch.models.pretrained import TOKENIZER, fetch_weights
from retouch.models.quantized import is_quantized

TAKEN_OVER = frozenset(
    # the scheduler; the pipeline and its index; the autoencoder
    {*("_shift", "sigma_min", "sigma_max", "is_distilled", "sample_sigmas", "default_sample_size", "use_slicing", "use_tiling")}
    | {f"tile_{kind}_{what}" for kind in ("sample", "latent") for what in ("min_size", "min_height", "min_width")}
    | {*("tile_overlap_factor", "tile_sample_stride_height", "tile_sample_stride_width"), "_attention_backend"}
)
"""Attributes of a pipeline and of what it contains with which a run trains as they are."""
HARMLESS = frozenset(
    # what policy.train and policy.gradient_checkpointing set
    {*("training", "gradient_checkpointing", "_gradient_checkpointing_func", "peft_config", "_hf_peft_config_loaded")}
    # what loading writes down
    | {*("name_or_path", "_name_or_path", "_class_name", "_diffusers_version", "dtype", "_is_hf_initialized")}
    | {*("hf_device_map", "hf_quantizer", "is_quantized", "quantization_config", "quantization_method", "is_loaded_in_4bit")}
    | {*("_is_quantized_training_enabled", "_weight_conversions")}
    | {*("_use_kernels", "_pre_quantization_dtype", "generation_config", "_progress_bar_config", "_use_default_values")}
    # what calling the pipeline leaves behind
    | {*("_guidance_scale", "_num_timesteps", "_interrupt", "_joint_attention_kwargs", "_attention_kwargs", "_clip_skip")}
    | {*("_skip_layer_guidance_scale", "_current_timestep", "_cfg_normalization", "_cfg_truncation")}
    | {*("timesteps", "sigmas", "num_inference_steps", "_step_index", "_begin_index", "_output_capturing_hooks_installed")}
    | {f"_{coder}{what}" for coder in ("", "enc_") for what in ("conv_num", "conv_idx", "feat_map")}
)
"""Attributes that change no image: a run sets them itself, or nothing reads them."""
_NAMED = 4


def require_as_built(pipeline: DiffusionPipeline, *, key: str) -> None:
    """Raise ValueError for a pipeline that samples in another way than its class and the configurations of its parts say.

    Not checked: its scheduler (``euler_scheduler``). ``key``: the argument with the pipeline, for messages.
    """
    if type(pipeline) is not getattr(diffusers, type(pipeline).__name__, None):
        raise ValueError(f"{key}: {type(pipeline).__name__} is a class of your own, and a run would not call its methods")
    for name, part in pipeline.components.items():
        if isinstance(part, nn.Module):
            require_plain(part, key=f"{key}.{name}")
    weights = [weight for name, weight in pipeline.transformer.named_parameters() if ".lora_" not in name]
    if len({weight.requires_grad for weight in weights}) > 1 and not any(is_quantized(weight) for weight in weights):
        raise ValueError(f"{key}.transformer: only some weights require gradients; peft_config decides which weights are trained")
    if found := list(islice(_changes(pipeline), _NAMED)):
        names = ", ".join(f"{key}.{name}" for name in found[: _NAMED - 1]) + (", ..." if len(found) == _NAMED else "")
        raise ValueError(
            f"{names}: changed after the {type(pipeline).__name__} was built, and a run would not train with this; undo the "
            "change, or load the pipeline again (docs/python.md lists what is taken over)"
        )


def require_plain(module: nn.Module, *, key: str) -> None:
    """Raise ValueError for a module whose weights cannot be moved and trained: offloaded, not loaded, or quantized in such a way.

    Layers of bitsandbytes that would repack their weights for inference on a CPU, into a layout without gradient, are kept from it.
    Known to train are bitsandbytes' 4 bits, and weights of torchao, quanto and GGUF.
    """
    what: Any = type(module).__name__
    layers = {type(layer).__name__: layer for layer in module.modules()}
    instead = 'load it in bfloat16 or float32, or give its folder or Hugging Face id with quantization_config="8bit" or "4bit"'
    if "Linear8bitLt" in layers:
        raise ValueError(
            f"{key}: this {what} is quantized by bitsandbytes in 8 bits, which picks outliers over all rows of a batch, so that a "
            f"probability depends on the other rows; {instead}"
        )
    if any(type(layer).__module__.startswith("sdnq") for layer in layers.values()):
        raise ValueError(f"{key}: this {what} is quantized by SDNQ, whose layers have no gradient; {instead}")
    declared = getattr(module, "quantization_method", None) is not None or getattr(module, "is_quantized", False)
    if declared and not any(is_quantized(weight) for weight in module.parameters()):
        raise ValueError(f"{key}: this {what} is quantized in a way that is not known to train; {instead}")
    if any(getattr(getattr(each, "quant_state", None), "packing_format_for_cpu", False) for each in module.parameters()):
        raise ValueError(f"{key}: bitsandbytes has repacked this {what} for inference on the CPU; load it again, and train first")
    repacking: list[Any] = [layer for layer in module.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in repacking:
        layer.support_avx512bf16_for_cpu = False
    # Calling a pipeline creates an empty registry of diffusers' hooks.
    hooks = [getattr(getattr(part, "_diffusers_hook", None), "hooks", None) for part in module.modules()]
    if any(hooks) or any(hasattr(part, "_hf_hook") for part in module.modules()):
        raise ValueError(
            f"{key}: this {what} is offloaded (enable_model_cpu_offload or device_map), or it has hooks for caching or casting; "
            "load it without them"
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ValueError(f"{key}: weights of this {what} are on the meta device; load them first, with from_pretrained")
    own_layers(module, key=key)


def _changes(pipeline: DiffusionPipeline) -> Iterator[str]:
    parts = pipeline.components
    for name, part in parts.items():
        if isinstance(part, ModelMixin | PreTrainedModel):
            with torch.device("meta"):
                built = _built(part) if isinstance(part, ModelMixin) else type(part)(copy.deepcopy(part.config))
            yield from _differences(part, built, name)
        elif isinstance(part, nn.Module):
            yield f"{name} ({type(part).__name__})"
        elif part is not None and name != "scheduler":  # the run calls the same tokenizers and processors
            functions = types.FunctionType | types.MethodType
            yield from (f"{name}.{method}" for method, value in vars(part).items() if isinstance(value, functions))
    yield from _differences(pipeline.scheduler, _built(pipeline.scheduler), "scheduler")
    ours = {key: value for key, value in vars(pipeline).items() if key not in parts}
    yield from _differences(ours, {key: value for key, value in vars(type(pipeline)(**parts)).items() if key not in parts}, "")


def _built(part: Any) -> Any:
    # diffusers would replace a value that was changed later by the default.
    return type(part).from_config({name: value for name, value in part.config.items() if name != "_use_default_values"})


_COMPARED = (str, int, float, bool, type(None), torch.dtype, torch.device)
_MOSTLY_EMPTY = (*_COMPARED, dict)


def _differences(live: Any, built: Any, path: str) -> Iterator[str]:
    """The paths of the attributes and entries in which two objects differ; the values of tensors do not count."""
    seen: set[int] = set()
    pending = [(live, built, path)]
    while pending:  # a model has 100,000 attributes, so this is a loop and not a recursion
        live, built, path = pending.pop()
        while isinstance(live, BaseTunerLayer):  # a LoRA of an earlier run in this process
            live = live.base_layer
        weight = getattr(live, "weight", None) if isinstance(live, nn.Linear) else live
        if id(live) in seen or (isinstance(weight, nn.Parameter) and is_quantized(weight)):
            continue
        if type(live) is not type(built):
            yield path
        elif isinstance(live, Tensor):
            yield from [path] if live.shape != built.shape else []
        elif isinstance(live, _COMPARED):
            if live != built and live == live:  # NaN is equal to NaN
                yield path
        elif isinstance(live, list | tuple):
            pending.append((dict(enumerate(live)), dict(enumerate(built)), path))
        elif isinstance(live, Mapping):
            seen.add(id(live))
            inner = []
            for name in {**live, **built}:
                value, other = live.get(name), built.get(name, ...)
                if value is other or (type(value) is type(other) and isinstance(value, _MOSTLY_EMPTY) and not (value or other)):
                    continue  # nearly all are None, False or empty dictionaries
                is_ours = not isinstance(value, dict | Tensor | int | str) and _of_libraries(name, value)
                if is_ours or name in TAKEN_OVER or name in HARMLESS or name == "_diffusers_hook":
                    continue
                inside = path if name in ("_modules", "_parameters", "_buffers") else f"{path}.{name}".removeprefix(".")
                inner.append((value, other, inside) if name in live and name in built else (None, ..., inside))
            pending += reversed(inner)
        elif hasattr(live, "__dict__") and not isinstance(live, types.FunctionType | types.MethodType | type):
            seen.add(id(live))
            pending.append((vars(live), vars(built), path))
        elif getattr(live, "__qualname__", None) != getattr(built, "__qualname__", None):
            yield path


def _of_libraries(name: Any, value: Any) -> bool:
    """Whether an attribute is a change that Retouch made in an earlier run, or a hook that transformers registers at a call."""
    while isinstance(value, functools.partial):
        value = value.func
    origin: str = getattr(getattr(value, "__func__", value), "__globals__", {}).get("__name__") or type(value).__module__
    return wings.is_own(origin) or (isinstance(name, int) and origin.startswith("transformers.") and callable(value))


def pipeline_parts(pipeline: DiffusionPipeline, device: torch.device | str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a loaded pipeline by name, its scheduler, and the configuration "index" (``model_index.json``).

    ``kinds``: the class of each part. Modules are moved to ``device`` and keep their dtype; all modules except the transformer are
    frozen. Raises ValueError if a part is missing, if a module is not an instance of its class, and as ``require_as_built``.
    """
    require_as_built(pipeline, key="model")
    parts: dict[str, Any] = {}
    for name, kind in kinds.items():
        part = pipeline.components.get(name)
        if name == "processor" and not isinstance(part, kind):
            part = getattr(part, "tokenizer", part)
        if issubclass(kind, nn.Module) and not isinstance(part, kind):
            part = getattr(part, "model", part)  # the language model without its head
        if part is None or (issubclass(kind, nn.Module) and not isinstance(part, kind)):
            found = "none" if part is None else f"a {type(part).__name__}"
            raise ValueError(f"{type(pipeline).__name__}.{name}: a {kind.__name__} is needed, and the pipeline has {found}")
        if isinstance(part, nn.Module):
            part.to(device)
            if name != "transformer":
                part.requires_grad_(False).eval()
        parts[name] = part
    return {**parts, "scheduler": pipeline.scheduler, "index": dict(pipeline.config)}


def pil_image_processor(processor: Any) -> Qwen2VLImageProcessorPil:
    """The image processor of a Qwen vision-language model in the PIL version, which needs no torchvision."""
    config = getattr(processor, "image_processor", processor).to_dict()
    made: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil(
        **{key: value for key, value in config.items() if not key.endswith("_type")}
    )
    return made


@dataclass(frozen=True)
class LoadedLanguageModel:
    """A language model of transformers with its tokenizer.

    ``processor``: the tokenizer, or a processor that contains it; None loads them from the model's folder or repository.
    """

    module: Any
    processor: Any = None

    def base(self) -> Any:
        """The module, without the LoRA that an earlier run in this process added.

        Raises ValueError if the module has a LoRA that Retouch did not add.
        """
        remove_lora(self.module, key="model")
        return self.module

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        if self.processor is None:
            return AutoTokenizer.from_pretrained(fetch_weights(self.module.name_or_path, TOKENIZER), local_files_only=True)
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def image_processor(self) -> Qwen2VLImageProcessorPil:
        """The image processor of a Qwen vision-language model."""
        if self.processor is None:
            folder = fetch_weights(self.module.name_or_path, TOKENIZER)
            found: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
            return found
        return pil_image_processor(self.processor)

    @staticmethod
    def in_fp32(autoencoder: nn.Module) -> Any:
        """The image tokenizer in fp32, because codes come from a nearest-neighbour search; a copy if it has another dtype."""
        return autoencoder if next(autoencoder.parameters()).dtype == torch.float32 else copy.deepcopy(autoencoder).float()
