"""A tiny untrained FLUX.1-Fill, to try a recipe from end to end without a download."""

import string
from collections.abc import Sequence

import torch
from transformers import T5Tokenizer

from retouch.models.flux.model import FluxFill
from retouch_worlds.models.flux_parts import autoencoder, scheduler, text, transformer

_LONGEST = 64
"""Maximum number of tokens of a prompt; each letter is a token."""


class TinyFluxFill(FluxFill):
    """FLUX.1-Fill's classes with random weights from ``seed``; ``size``: (height, width) of the images in px, multiples of 8.

    Example, in a recipe::

        policy.model: {
          kind: 'import',
          class: 'retouch_worlds.models.tiny_fill:TinyFluxFill',
          args: { seed: 0, size: [64, 64] },
        }
    """

    def __init__(self, *, seed: int, size: Sequence[int], device: torch.device | str = "cpu") -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            reader = text(_letters(), max_sequence_length=_LONGEST)
            module, vae = transformer(), autoencoder()
        for frozen in (*reader.encoders, vae):
            frozen.requires_grad_(False).eval().to(device)
        super().__init__(
            transformer=module.to(device),
            vae=vae,
            text=reader,
            scheduler_config=dict(scheduler().config),
            size=(size[0], size[1]),
        )


def _letters() -> T5Tokenizer:
    """A tokenizer with a token for each printable ASCII character."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=[*special, *((letter, -3.0) for letter in string.printable.strip())], extra_ids=0)
