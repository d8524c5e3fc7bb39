"""Weights from single files, as they are shared for ComfyUI and by trainers of LoRAs: of a whole denoiser, and LoRAs to merge."""

from pathlib import Path
from typing import Any

import diffusers
from safetensors import SafetensorError
from torch import nn

from retouch.models.lora import part_of_pipeline
from retouch.models.quantized import compute_dtype, is_quantized


def replace_weights(module: nn.Module, file: str, *, folder: Path) -> None:
    """Replace the weights of a denoiser by those of a file. A GGUF file stays quantised.

    ``folder``: the pipeline, whose configuration the file must fit. Raises ValueError if it does not.
    """
    kind, where = type(module), next(module.parameters()).device
    if not hasattr(kind, "from_single_file"):
        raise ValueError(f"policy.model.weights: diffusers reads no single file of a {kind.__name__}; give its folder as path")
    options: dict[str, Any] = {"config": str(folder), "subfolder": part_of_pipeline(module), "local_files_only": True}
    if file.endswith(".gguf"):
        options["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=compute_dtype(module))
    try:
        found = kind.from_single_file(file, torch_dtype=compute_dtype(module), **options)
        found.to(where)  # a weight that the file does not have is on the meta device, and cannot be moved
    except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"policy.model.weights: {file} has not the weights of a {kind.__name__} as in {folder}") from error
    # Other objects hold the module, so the module stays and what it contains changes.
    vars(module).update(vars(found))


def merge_lora(module: nn.Module, file: str, *, scale: float, pipeline: str | None) -> None:
    """Add a LoRA, times ``scale``, to the weights of a denoiser.

    ``pipeline``: the pipeline class, which knows the formats of its LoRAs. Raises ValueError for a LoRA of another model, and for
    one that changes text encoders too.
    """
    reader: Any = getattr(diffusers, pipeline or "", None)
    part, key = part_of_pipeline(module), "policy.model.loras"
    if not hasattr(reader, "lora_state_dict") or not hasattr(module, "load_lora_adapter"):
        raise ValueError(f"{key}: diffusers merges no LoRA into a {type(module).__name__} of a {pipeline}")
    if any(is_quantized(weight) for weight in module.parameters()):
        raise ValueError(f"{key}: a LoRA cannot be merged into quantised weights; use policy.model.weights in 16 bits")
    try:
        tensors, *alphas, metadata = reader.lora_state_dict(
            file, return_alphas=True, return_lora_metadata=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, LookupError, SafetensorError) as error:
        raise ValueError(f"{key}: {file} is no LoRA that {pipeline} reads: {str(error).strip().splitlines()[0]}") from None
    layers = dict(module.named_modules())
    wrong = sorted({name.split(".lora")[0] for name in tensors if name.split(".lora")[0].removeprefix(f"{part}.") not in layers})
    if wrong or not tensors:
        named = ", ".join(wrong[:3]) or "no tensors"
        raise ValueError(f"{key}: {file} has {named}, which {type(module).__name__} has not; only its own layers can be merged")
    loader: Any = module
    loader.load_lora_adapter(tensors, network_alphas=alphas[0] if alphas else None, metadata=metadata, prefix=part)
    loader.fuse_lora(lora_scale=scale)
    loader.unload_lora()
