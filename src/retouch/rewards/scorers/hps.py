"""HPSv2 (arXiv 2306.09341): what people prefer, from a CLIP ViT-H/14 that was tuned on their choices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from retouch.rewards.scorers.two_towers import TwoTowers
from retouch.types import Column, Sample, Scores


class HpsReward:
    """Column ``hps``, 0 to 1: max(cosine, 0) between the instruction and the picture; about 0.2 to 0.35 for pictures in use.

    ``path``: the weights of HPSv2 or HPSv2.1 as a transformers CLIP in safetensors, with tokenizer and image processor. They are
    published for open_clip as pickles: convert them where you trust them (adams-story/HPSv2-hf is such a conversion of HPSv2,
    itself to be saved again as safetensors).
    A sample without a picture is the policy's own fault: 0. ValueError: no weights.
    """

    columns: Mapping[str, Column] = {"hps": Column(0.0, 1.0)}

    def __init__(self, path: str | Path, *, device: torch.device | str = "cpu") -> None:
        self._towers = TwoTowers(path, device=device)

    @property
    def fingerprint(self) -> str:
        """The model's weights."""
        return self._towers.fingerprint

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        cosine, _ = self._towers.of_samples(samples)
        return {"hps": cosine.clamp(0, 1)}
