"""The dtype of LoRA weights, and of the weights that the optimizer updates; the alpha of a stored LoRA."""

from pathlib import Path
from typing import Literal

import pytest
import torch

import tiny_models
import tiny_policies as tiny
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import ReplicatedStepper
from retouch.models.common.lora import write_lora
from retouch.models.train import Lora
from retouch.policies.weights import WeightCopies

TARGETS = ("attn.to_q", "attn.to_out.0")


def network(dtype: torch.dtype, **options: object) -> torch.nn.Module:
    module = tiny_models.sd3_transformer().to(dtype)
    Lora.model_validate({"kind": "lora", "rank": 4, "alpha": 8, **options}).make_trainable(module, targets=TARGETS, seed=3)
    return module


@pytest.mark.parametrize(
    ("base", "weights", "trained"),
    [
        (torch.bfloat16, "base", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "base", torch.float32),
        (torch.float16, "base", torch.float32),
    ],
)
def test_lora_weights_are_bfloat16_only_for_a_bfloat16_base(base: torch.dtype, weights: str, trained: torch.dtype) -> None:
    module = network(base, weights=weights)
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {trained}
    said = Lora(kind="lora", rank=4, alpha=8, weights=weights).trained_dtype(str(base).removeprefix("torch."))  # type: ignore[arg-type]
    assert said == str(trained).removeprefix("torch.")


def test_lora_products_are_bfloat16_and_optimizer_weights_are_fp32() -> None:
    """With fp32 adapters, only the adapters' matrix products would run in fp32. Small steps are kept in the fp32 master weights."""
    found = {}
    for weights in ("base", "float32"):
        module = network(torch.bfloat16, weights=weights)
        model = tiny.sd3_model()
        conditioning = model.encode(tiny.tasks())
        x = model.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(2)])
        types: list[torch.dtype] = []
        for name, layer in module.named_modules():
            if name.endswith(("lora_A.default", "lora_B.default")):
                layer.register_forward_hook(lambda layer, inputs, output, types=types: types.append(output.dtype))
        copies = WeightCopies(module)
        copies.snapshot("reference")
        stepper = ReplicatedStepper(module, Ranks())
        for _ in range(3):
            velocity = model.velocity(module, x, torch.tensor([0.7, 0.3]), conditioning)
            stepper.backward(velocity.square().mean())
            stepper.step(1e-4)
        moved = [stepper.weights[name].detach().float() - copies.copies["reference"][name].float() for name in stepper.weights]
        found[weights] = torch.cat([each.flatten() for each in moved])
        assert set(types) == {torch.bfloat16 if weights == "base" else torch.float32}
        assert {weight.dtype for weight in stepper.weights.values()} == {torch.float32}
    assert torch.nn.functional.cosine_similarity(found["base"], found["float32"], dim=0) > 0.9


@pytest.mark.parametrize("format", ["diffusers", "peft"])
def test_a_lora_of_another_alpha_raises_with_the_alpha_to_set(tmp_path: Path, format: Literal["diffusers", "peft"]) -> None:
    section = Lora(rank=4, alpha=32, targets=("attn.to_q",))
    module = tiny_models.sd3_transformer()
    section.make_trainable(module, targets=(), seed=0)
    write_lora(module, tmp_path, pipeline="StableDiffusion3Pipeline", format=format)
    same = section.model_copy(update={"init_from": str(tmp_path)})
    same.make_trainable(tiny_models.sd3_transformer(), targets=(), seed=1)
    with pytest.raises(ValueError, match=r"trained with alpha 32, .* by 0\.25; set policy\.train\.alpha to 32"):
        same.model_copy(update={"alpha": 8.0}).make_trainable(tiny_models.sd3_transformer(), targets=(), seed=1)
