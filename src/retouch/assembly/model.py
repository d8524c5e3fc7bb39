"""The model that a recipe names, with what trains of it made trainable."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from retouch.assembly.ip_adapter import add_ip_adapter
from retouch.core.random import generator
from retouch.models.base import ImageModel
from retouch.models.qwen_vl.model import LORA_TARGETS as WRITER_TARGETS
from retouch.policies.weights import WeightCopies
from retouch.recipe.ip_adapter import IpAdapter, lora_of
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.train import FullWeights, Lora
from retouch.recipe.writer import AutoregressivePolicy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "weights.safetensors")


def make_trainable(
    module: nn.Module,
    policy: DenoisingPolicyKeys | AutoregressivePolicy,
    *,
    seed: int,
    copy_devices: Mapping[str, torch.device] | None = None,
) -> WeightCopies:
    """Freeze everything, then let train what the recipe says: all weights of the module, or adapters in fp32. ``copy_devices``: see
    ``WeightCopies``."""
    module.requires_grad_(isinstance(policy.train, FullWeights)).eval()
    if (lora := lora_of(policy.train)) is not None:
        _add_lora(module, lora, lora_targets(policy), seed=seed)
    if isinstance(policy.train, IpAdapter):
        add_ip_adapter(module, policy.train, seed=seed)
    if policy.gradient_checkpointing and isinstance(policy, DenoisingPolicyKeys):
        # A module without it raises its own clear error.
        module.enable_gradient_checkpointing()  # type: ignore[operator]
    return WeightCopies(module, devices=copy_devices)


def lora_targets(policy: DenoisingPolicyKeys | AutoregressivePolicy) -> Sequence[str]:
    """The linear layers that get an adapter: those that the recipe names, else the family's. ValueError for an imported model's."""
    lora = lora_of(policy.train)
    assert lora is not None
    if lora.targets is not None:
        return lora.targets
    if not isinstance(policy.model, ImageModel):
        return WRITER_TARGETS
    if not policy.model.lora_targets:
        raise ValueError(
            "policy.train.targets: an imported model has no usual LoRA targets; name the linear layers that get an adapter"
        )
    return policy.model.lora_targets


def _add_lora(module: nn.Module, lora: Lora, targets: Sequence[str], *, seed: int) -> None:
    """Gaussian A and zero B from the seed (or an existing LoRA), without touching the global generator."""
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, init_lora_weights="gaussian", target_modules=list(targets)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "lora").initial_seed())
        module.add_adapter(config)  # type: ignore[operator]
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if lora.init_from is not None:
        _load_lora(module, Path(lora.init_from))


def _load_lora(module: nn.Module, folder: Path) -> None:
    """Weights of a LoRA that diffusers or PEFT wrote. ValueError where its matrices are not those of the recipe."""
    found = [folder / name for name in _LORA_FILES if (folder / name).is_file()]
    if not found:
        raise ValueError(f"policy.train.init_from: {folder} has none of {', '.join(_LORA_FILES)}")
    given = {_plain_name(name): tensor for name, tensor in load_file(found[0]).items()}
    wanted = {_plain_name(name): p.shape for name, p in module.named_parameters() if p.requires_grad}
    odd = sorted(given.keys() ^ wanted.keys()) or sorted(name for name in wanted if given[name].shape != wanted[name])
    if odd:
        raise ValueError(f"policy.train.init_from: {found[0]} does not fit the recipe's rank and targets, at {odd[0]} first")
    set_peft_model_state_dict(module, given, adapter_name="default")


def _plain_name(name: str) -> str:
    for prefix in ("base_model.model.", "transformer."):
        name = name.removeprefix(prefix)
    return name.replace(".default.", ".")
