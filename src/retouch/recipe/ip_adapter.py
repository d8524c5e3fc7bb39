"""Section of a recipe about an IP-Adapter: what shows a denoising policy each task's reference picture, and trains."""

from typing import Literal

from retouch.config.section import Count, Positive, Section, Share
from retouch.recipe.train import FullWeights, Lora


class IpAdapter(Section):
    """An adapter trains that shows the model each task's reference picture, and a LoRA beside it where there is one; the model's
    own weights stay as they are. The reference of a KL is the policy at its start, or what a supervised phase before made of it.

    Flux's ``load_ip_adapter`` in diffusers reads 4 tokens, or 16 of a full-size model, of a linear projection in double blocks.
    """

    kind: Literal["ip-adapter"]
    encoder: str
    """Folder or Hugging Face id of the frozen CLIP or SigLIP model that looks at references (diffusers takes CLIP); ``playground``
    is the built-in one."""
    tokens: Count = 4
    """Tokens that a reference becomes; 4, 16 and 128 are usual."""
    projection: Literal["linear", "mlp"] = "linear"
    """What makes them: one layer, or two."""
    blocks: Literal["double", "all"] = "double"
    """Blocks that attend to them: those with a stream of the picture's own, or Flux's single ones too."""
    scale: Positive = 1.0
    """Factor of what attention finds in the reference."""
    dropout: Share = 0.0
    """Share of tasks that are shown no reference in supervised phases, which guidance needs; other phases always show it."""
    init_from: str | None = None
    """File, or folder with an ``ip_adapter.safetensors``, to go on from; null begins as the model without an adapter."""
    lora: Lora | None = None
    """A LoRA that trains beside it; null trains the adapter alone."""


def lora_of(train: FullWeights | Lora | IpAdapter) -> Lora | None:
    """The LoRA that trains, alone or beside an IP-Adapter."""
    if isinstance(train, IpAdapter):
        return train.lora
    return train if isinstance(train, Lora) else None
