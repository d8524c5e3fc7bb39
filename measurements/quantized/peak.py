"""The peak of a training step through a quantised transformer: that of the CPU's allocator, and that which a dry run counts.

    python measurements/quantized/peak.py > measurements/quantized/peak.jsonl

Prints a line of JSON for each model and base, with the bytes of both: weights, activations and gradients of a LoRA over a few
blocks with random weights. Attention has other kernels on a GPU, with other workspaces: this difference is the same for all bases.
Fails if what quantised weights change is not counted within 3 % of the peak. ``--width``: attention heads of 64 channels.
"""

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bitsandbytes
import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn

from retouch.models import quantized
from retouch_plan.accelerator import Accelerator, register
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Meter
from retouch_plan.models import QuantizedLinear

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from measured_memory import measured_peak

CPU = torch.device("cpu")
TOKENS, WORDS = 256, 64
Model = tuple[nn.Module, Callable[[torch.device], dict[str, Any]]]
"""A model, and what makes the inputs of one row on a device."""


def random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape).to(device)


def sd3(heads: int) -> Model:
    """Stable Diffusion 3.5 medium with six blocks."""
    given = {"num_layers": 6, "num_attention_heads": heads, "attention_head_dim": 64, "caption_projection_dim": 64 * heads}
    module = diffusers.SD3Transformer2DModel(
        **given, dual_attention_layers=(0,), qk_norm="rms_norm", pos_embed_max_size=96, joint_attention_dim=512, sample_size=32
    )
    shapes = {"hidden_states": (1, 16, 32, 32), "encoder_hidden_states": (1, WORDS, 512), "pooled_projections": (1, 2048)}
    return module, lambda device: {
        **{name: random(*shape, device=device) for name, shape in shapes.items()},
        "timestep": torch.ones(1).to(device),
    }


def flux(heads: int) -> Model:
    """FLUX.1 with one block of two streams and two of one stream."""
    module = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=2, num_attention_heads=heads // 2, joint_attention_dim=512, guidance_embeds=True
    )
    shapes = {"hidden_states": (1, TOKENS, 64), "encoder_hidden_states": (1, WORDS, 512), "pooled_projections": (1, 768)}
    return module, lambda device: {
        **{name: random(*shape, device=device) for name, shape in shapes.items()},
        **{name: torch.ones(1).to(device) for name in ("timestep", "guidance")},
        "img_ids": torch.zeros(TOKENS, 3).to(device),
        "txt_ids": torch.zeros(WORDS, 3).to(device),
    }


def qwen_image(heads: int) -> Model:
    """Qwen-Image with two blocks."""
    module = diffusers.QwenImageTransformer2DModel(num_layers=2, num_attention_heads=heads // 2, joint_attention_dim=512)
    shapes = {"hidden_states": (1, TOKENS, 64), "encoder_hidden_states": (1, WORDS, 512)}
    return module, lambda device: {
        **{name: random(*shape, device=device) for name, shape in shapes.items()},
        "timestep": torch.ones(1).to(device),
        "img_shapes": [[(1, 16, 16)]],
    }


MODELS = {"SD3": sd3, "FLUX": flux, "Qwen-Image": qwen_image}


def prepared(name: str, heads: int, bits: Any, device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
    """The quantised model with a LoRA on ``device``, and its training step."""
    torch.manual_seed(0)
    module, inputs = MODELS[name](heads)
    if bits is not None:
        quantized.quantize(module.requires_grad_(False), bits, device=device)
    module.to(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated")
        module.add_adapter(LoraConfig(r=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    module.enable_gradient_checkpointing()
    given = inputs(device)
    trained = [weight for weight in module.train().parameters() if weight.requires_grad]
    for weight in trained:
        weight.grad = torch.zeros_like(weight)

    def step() -> None:
        module(**given, return_dict=False)[0].square().mean().backward()

    return module, step


def counted(name: str, heads: int, bits: Any) -> int:
    """The peak that a dry run counts, in bytes."""
    meter = Meter(MACHINES["h100"])
    with (
        Accelerator(observe=meter.observe, on_read=meter.wait, is_weight=meter.is_weight),
        patch.object(quantized, "quantized_layer", QuantizedLinear),
    ):
        _, step = prepared(name, heads, bits, torch.device("dryrun:0"))
        step()  # the first step also makes tables that stay
        with meter.stage("step"):
            step()
    return meter.stages["step"].peak


def measured(name: str, heads: int, bits: Any) -> int:
    """The peak of the same step on the CPU, with the real libraries, in bytes."""
    before = held()
    _, step = prepared(name, heads, bits, CPU)
    step()
    made = {place: size for place, size in held().items() if place not in before}
    return sum(made.values()) + measured_peak(step)


def held() -> dict[int, int]:
    """Bytes of the storage of each tensor in CPU memory, by its address. A model's tables are not always buffers."""
    gc.collect()
    kinds = (Tensor, nn.Parameter, bitsandbytes.nn.Params4bit)
    found = [each for each in gc.get_objects() if type(each) in kinds and each.device == CPU]
    return {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    register()
    off = []
    for name in given.models:
        full = 0
        for bits in (None, "8bit", "4bit"):
            of_device, of_cpu = counted(name, given.width, bits), measured(name, given.width, bits)
            line = {"model": name, "base": bits, "counted": of_device, "measured": of_cpu, "ratio": round(of_device / of_cpu, 4)}
            print(json.dumps(line), flush=True)
            full = full if bits else of_device - of_cpu
            off += [line] if abs(of_device - of_cpu - full) > 0.03 * of_cpu else []
    raise SystemExit(f"what quantised weights change is not counted within 3 %: {off}" if off else 0)


if __name__ == "__main__":
    main()
