"""The editor of image tokens that a recipe names."""

from pathlib import Path
from typing import Any

import torch

from retouch.assembly.model import DTYPES
from retouch.memory.sizes import parts
from retouch.models.common.pretrained import fetch_writer, find_writer
from retouch.models.emu3.load import load_emu3, parts_of_emu3
from retouch.models.emu3.model import DRAW, THINK, Emu3Editor
from retouch.playground.models import playground_weights
from retouch.playground.world.scenes import SIZE
from retouch.recipe.emu3 import PlaygroundEmu3, TokenModel


def build_emu3(section: TokenModel, *, device: torch.device, gradient_checkpointing: bool) -> Emu3Editor:
    """Load the language model and its autoencoder, all of it frozen. What is not on this machine is downloaded.

    ValueError where a folder holds something else.
    """
    if isinstance(section, PlaygroundEmu3):
        shipped = playground_weights("emu3")
        path, tokenizer, autoencoder = _playground(section), shipped / "tokenizer", shipped / "autoencoder"
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no playground Emu3; `retouch playground build --emu3` makes it")
    else:
        path = fetch_writer(section.path)
        tokenizer = path if section.tokenizer is None else fetch_writer(section.tokenizer)
        autoencoder = path if section.autoencoder is None else fetch_writer(section.autoencoder)
    return load_emu3(
        path,
        tokenizer=tokenizer,
        autoencoder=autoencoder,
        size=(section.size[0], section.size[1]) if section.size is not None else (SIZE, SIZE),
        prefill=THINK if section.think else DRAW,
        grammar=section.grammar,
        dtype=DTYPES[section.dtype],
        device=device,
        attention=section.attention,
        gradient_checkpointing=gradient_checkpointing,
    )


def find_emu3(section: TokenModel) -> tuple[Path | None, bool]:
    """The folder of the language model if it is on this machine, and whether all the rest is here too. Asks no network."""
    if isinstance(section, PlaygroundEmu3):
        return _playground(section), True
    others = [find_writer(path) for path in (section.tokenizer, section.autoencoder) if path is not None]
    found = find_writer(section.path)
    return found, found is not None and None not in others


def describe_emu3(section: TokenModel, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Its parts, ``writer`` and ``autoencoder``, from their configurations; the published ones where they are not on this machine.

    ``folder``: of the language model. ValueError where a folder holds something else.
    """
    if isinstance(section, PlaygroundEmu3):
        apart: Path | None = playground_weights("emu3") / "autoencoder"
    else:
        apart = folder if section.autoencoder is None else find_writer(section.autoencoder)
    if folder is None or apart is None:
        return parts("emu3")
    return parts_of_emu3(folder, autoencoder=apart)


def _playground(section: PlaygroundEmu3) -> Path:
    return Path(section.path) if section.path else playground_weights("emu3") / section.start
