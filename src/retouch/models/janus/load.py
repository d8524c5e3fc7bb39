"""Reading Janus-Pro from a local folder in transformers' layout (``deepseek-community/Janus-Pro-1B``): safetensors, no code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, JanusForConditionalGeneration
from transformers.models.janus.modeling_janus import JanusVQVAE

from retouch.models.common.folders import LOCAL
from retouch.models.janus.model import JanusDrawing, JanusPainter
from retouch.models.language import Attention

_AUTOENCODER = "model.vqmodel."


class JanusFromFolder(JanusPainter):
    """The painter in the folder ``path``, all of it frozen: what draws in ``dtype``, the autoencoder in fp32.

    A recipe names it as ``policy.model.class``. ``drawing``: the folder ``writer`` of an export of full weights, which draws in
    place of the folder's own. ValueError where either folder holds something else.
    """

    def __init__(
        self,
        *,
        path: str,
        drawing: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16",
        attention: Attention = "sdpa",
        gradient_checkpointing: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        folder = Path(path)
        if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} holds no Janus: no config.json or no tokenizer.json; give the local folder of one")
        whole = JanusForConditionalGeneration.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=attention, **LOCAL
        )
        vq = JanusVQVAE(whole.config.vq_config)
        vq.load_state_dict(_autoencoder(folder))
        draws = JanusDrawing(whole)
        if drawing is not None:
            _load(draws, Path(drawing))
        super().__init__(
            draws.requires_grad_(False).eval().to(device),
            AutoTokenizer.from_pretrained(folder, local_files_only=True),
            vq=vq.float().to(device),
            gradient_checkpointing=gradient_checkpointing,
        )


def _autoencoder(folder: Path) -> dict[str, Tensor]:
    """Its weights as they are stored, since codes are nearest neighbours."""
    found = {name.removeprefix(_AUTOENCODER): tensor.float() for name, tensor in _stored(folder, _AUTOENCODER)}
    if not found:
        raise ValueError(f"{folder} holds no weights of Janus' autoencoder ({_AUTOENCODER}*) in safetensors")
    return found


def _load(draws: JanusDrawing, folder: Path) -> None:
    """Exactly the weights of what draws, of the same sizes."""
    stored, own = dict(_stored(folder, "")), draws.state_dict()
    odd = stored.keys() ^ own.keys() or {name for name in own if own[name].shape != stored[name].shape}
    if odd:
        raise ValueError(
            f"{folder} does not hold the weights of what draws of this Janus ({len(odd)} differ, {min(odd)} say); give the folder "
            "writer of an export of full weights"
        )
    draws.load_state_dict(stored)


def _stored(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of all of that prefix in the folder's safetensors."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118, it is no mapping
            yield from ((name, tensors.get_tensor(name)) for name in names)
