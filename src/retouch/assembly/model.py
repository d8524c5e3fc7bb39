"""The model that a recipe names, with what trains of it made trainable."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from retouch.assembly.families import FAMILIES
from retouch.assembly.ip_adapter import add_ip_adapter
from retouch.config.imports import build_class
from retouch.core.random import generator
from retouch.models.common.pretrained import fetch_weights
from retouch.models.flux.fill import FluxFill
from retouch.models.qwen_image.edit import QwenImageEdit
from retouch.models.qwen_image.model import QwenImage
from retouch.models.qwen_vl.model import LORA_TARGETS as WRITER_TARGETS
from retouch.policies.weights import WeightCopies
from retouch.protocols import DenoisingModel
from retouch.recipe.ip_adapter import IpAdapter, lora_of
from retouch.recipe.policy import (
    DenoisingPolicy,
    ImportedModel,
    Model,
    PlaygroundModel,
    PlaygroundPainter,
    PlaygroundWords,
)
from retouch.recipe.train import FullWeights, Lora
from retouch.recipe.writer import AutoregressivePolicy
from retouch.records.files import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "weights.safetensors")
# Of each kind its folder among the package's, what it is, and the flag of the command that makes it.
_PLAYGROUND = {
    "playground": ("editor", "model", ""),
    "playground-painter": ("painter", "painter", " --painter"),
    "playground-words": ("words", "painter of words", " --words"),
}


def playground_weights(name: str = "editor") -> Path:
    """The base ``editor`` that ships with the package, or its ``painter``, or ``words``, its painter of words."""
    return Path(str(files("retouch.playground"))) / "weights" / name


def playground_folder(model: PlaygroundModel) -> Path:
    """Where its weights lie: where the recipe says, or in the package."""
    return Path(model.path) if model.path else playground_weights(_PLAYGROUND[model.kind][0])


def build_model(model: Model, *, device: torch.device) -> DenoisingModel:
    """Load the model, all of it frozen but for the transformer."""
    if isinstance(model, ImportedModel):
        made: DenoisingModel = build_class(model.class_, model.args, device=device)
        return made
    dtype = DTYPES[model.dtype]
    size = None if model.size is None else (model.size[0], model.size[1])
    if isinstance(model, PlaygroundModel):
        return _playground(model, dtype=dtype, device=device, size=size)
    told: dict[str, Any] = {} if model.guidance is None else {"guidance": model.guidance}
    adapter = FAMILIES[model.kind].adapter
    loaded: DenoisingModel = adapter.from_pretrained(fetch_weights(model.path), dtype=dtype, device=device, size=size, **told)
    return loaded


def _playground(
    model: PlaygroundModel, *, dtype: torch.dtype, device: torch.device, size: tuple[int, int] | None
) -> DenoisingModel:
    """A published family in small: the same loading, told what the folder states beside its weights."""
    _, called, flag = _PLAYGROUND[model.kind]
    path = playground_folder(model)
    if not (path / "adapter.json").is_file():
        raise ValueError(f"{path} holds no playground {called}; `retouch playground build{flag}` makes it")
    stated = read_json(path / "adapter.json")
    match model:
        case PlaygroundPainter():
            size = (stated["size"][0], stated["size"][1]) if size is None else size
            return QwenImage.from_pretrained(path, dtype=dtype, device=device, size=size, template=stated["template"])
        case PlaygroundWords():
            length = stated["max_sequence_length"]
            return FluxFill.from_pretrained(path, dtype=dtype, device=device, size=size, max_sequence_length=length)
        case _:
            told = {key: stated[key] for key in ("template", "condition_area", "source_area")}
            return QwenImageEdit.from_pretrained(path, dtype=dtype, device=device, size=size, **told)


def make_trainable(
    module: nn.Module,
    policy: DenoisingPolicy | AutoregressivePolicy,
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
    if policy.gradient_checkpointing and isinstance(policy, DenoisingPolicy):
        # A module without it raises its own clear error.
        module.enable_gradient_checkpointing()  # type: ignore[operator]
    return WeightCopies(module, devices=copy_devices)


def lora_targets(policy: DenoisingPolicy | AutoregressivePolicy) -> Sequence[str]:
    """The linear layers that get an adapter: those that the recipe names, else the family's. ValueError for an imported model's."""
    lora = lora_of(policy.train)
    assert lora is not None
    if lora.targets is not None:
        return lora.targets
    if isinstance(policy.model, ImportedModel):
        raise ValueError(
            "policy.train.targets: an imported model has no usual LoRA targets; name the linear layers that get an adapter"
        )
    return FAMILIES[policy.model.kind].lora_targets if isinstance(policy, DenoisingPolicy) else WRITER_TARGETS


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
