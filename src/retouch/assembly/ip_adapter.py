"""An IP-Adapter from what a recipe says of it: on the transformer, and the frozen encoder of its references beside it."""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from retouch.models.common.pretrained import fetch_encoder
from retouch.models.ip_adapter import adapter as ip_adapter
from retouch.models.ip_adapter import files as ip_adapter_files
from retouch.models.ip_adapter.image_encoder import ImageEncoder, embed_width
from retouch.models.ip_adapter.reference_model import Referenced
from retouch.protocols import DenoisingModel
from retouch.recipe.ip_adapter import IpAdapter
from retouch.records.files import write_json


def form_of(section: IpAdapter) -> ip_adapter.Form:
    return ip_adapter.Form(tokens=section.tokens, projection=section.projection, blocks=section.blocks, scale=section.scale)


def add_ip_adapter(transformer: nn.Module, section: IpAdapter, *, seed: int) -> None:
    """Put the recipe's adapter on the transformer, which trains. ValueError where ``init_from`` is of another form."""
    width = embed_width(fetch_encoder(section.encoder))
    ip_adapter.attach(transformer, form_of(section), embed_width=width, seed=seed)
    if section.init_from is not None:
        try:
            ip_adapter_files.read(transformer, Path(section.init_from))
        except ValueError as error:
            raise ValueError(f"policy.train.init_from: {error}") from None


def show_references(model: DenoisingModel, section: IpAdapter, *, dtype: torch.dtype, device: torch.device) -> Referenced:
    """The model with the encoder beside it."""
    return Referenced(model, ImageEncoder.from_pretrained(fetch_encoder(section.encoder), dtype=dtype, device=device))


def write_ip_adapter(transformer: nn.Module, section: IpAdapter, to: Path) -> None:
    """The adapter as it is now, and how it is made: what ``Form`` takes, the encoder, and whether diffusers loads it."""
    ip_adapter_files.write(transformer, to)
    form = form_of(section)
    about = {**asdict(form), "encoder": section.encoder, "diffusers": ip_adapter.read_by_diffusers(transformer, form)}
    write_json(to / "ip_adapter.json", about)
