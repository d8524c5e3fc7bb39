"""PickScore (arXiv 2305.01569): what people would pick, from a CLIP that was tuned on their choices."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from retouch.rewards.scorers.two_towers import TwoTowers
from retouch.types import Column, Sample, Scores


class PickScoreReward:
    """Column ``pickscore``, 0 to 100: the model's scale (at most 100) times max(cosine, 0); about 18 to 24 for pictures in use.

    ``path``: the weights of yuvalkirstain/PickScore_v1, with the tokenizer and the image processor of
    laion/CLIP-ViT-H-14-laion2B-s32B-b79K in the same folder.
    A sample without a picture is the policy's own fault: 0. ValueError: no weights, or a scale above 100.
    """

    columns: Mapping[str, Column] = {"pickscore": Column(0.0, 100.0)}

    def __init__(self, path: str | Path = "yuvalkirstain/PickScore_v1", *, device: torch.device | str = "cpu") -> None:
        self._towers = TwoTowers(path, device=device)
        if self._towers.scale > 100.01:
            raise ValueError(f"{path} scales cosines by {self._towers.scale:.1f}, PickScore by at most 100; it is another model")

    @property
    def fingerprint(self) -> str:
        """The model's weights."""
        return self._towers.fingerprint

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        cosine, _ = self._towers.of_samples(samples)
        return {"pickscore": (self._towers.scale * cosine).clamp(0, 100)}
