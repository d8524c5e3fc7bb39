"""The image model behind a writer: what it is made of, where that lies, and what it shares with the writer."""

import torch
from torch import nn

from retouch.models.qwen_image.edit import QwenImageEdit
from retouch.protocols import DenoisingModel


def parts_of(model: DenoisingModel) -> list[nn.Module]:
    """Its modules. Raises ValueError for a model without a property ``parts``, of which only the transformer is known."""
    parts: list[nn.Module] | None = getattr(model, "parts", None)
    if parts is None:
        raise ValueError(f"devices.offload: what {type(model).__name__} is made of is not known here; take false")
    return parts


def share_encoder(editor: QwenImageEdit, writer: nn.Module, *, policy_reads: bool, base_stays: bool) -> bool:
    """Drop the editor's own text encoder where ``writer`` stands for it; returns whether it does.

    It does where the policy itself reads, and where both hold the same numbers, those of the writer stay as they are while it
    trains (a LoRA's base), and both compute alike. Call it before anything trains, and before the editor is moved to its device.
    """
    if not policy_reads and not (base_stays and _alike(editor.text.encoder, writer)):
        return False
    editor.text.encoder = writer
    return True


def move(model: DenoisingModel, device: torch.device, *, but: nn.Module) -> None:
    """Move what it is made of to ``device``, without ``but``, which is somebody else's."""
    for part in parts_of(model):
        if part is not but:
            part.to(device)


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules are of one class, compute attention the same way, and hold the same numbers of the same type."""
    if type(one) is not type(other) or _attention(one) != _attention(other):
        return False
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    if mine.keys() != theirs.keys():
        return False
    return all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name].to(tensor.device)) for name, tensor in mine.items()
    )


def _attention(module: nn.Module) -> object:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)
