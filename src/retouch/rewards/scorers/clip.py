"""How far a picture shows what the task's own words say (system C): the similarity of CLIP or SigLIP to the original prompt."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from retouch.rewards.scorers.two_towers import TwoTowers
from retouch.types import Column, Sample, Scores


class ClipReward:
    """Columns of the cosine between ``task.instruction`` (never what a writer made of it) and the picture:

    - ``cosine``, -1 to 1, as it is: about 0.15 to 0.35 for ViT-B/32. The policy's own fault is -1, far below all that is drawn.
    - ``clip_score``, 0 to 2.5: 2.5 max(cosine, 0) (CLIPScore, arXiv 2104.08718).
    - ``similarity``, 0 to 1: max(cosine, 0), for sums with other scores of that range.
    - ``truncated``, a diagnostic: 1 where the prompt is longer than the model reads (77 tokens of CLIP), so that its end counts
      for nothing.

    ``path``: a folder or a Hugging Face id whose weights are on this machine. ValueError: they are not.
    """

    columns: Mapping[str, Column] = {
        "cosine": Column(-1.0, 1.0),
        "clip_score": Column(0.0, 2.5),
        "similarity": Column(0.0, 1.0),
        "truncated": Column(0.0, 1.0, diagnostic=True),
    }

    def __init__(self, path: str | Path = "openai/clip-vit-base-patch32", *, device: torch.device | str = "cpu") -> None:
        self._towers = TwoTowers(path, device=device)

    @property
    def fingerprint(self) -> str:
        """The model's weights."""
        return self._towers.fingerprint

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32. A sample without a picture is the policy's own fault: the column's minimum."""
        cosine, truncated = self._towers.of_samples(samples)
        similarity = cosine.clamp(min=0)
        return {"cosine": cosine, "clip_score": 2.5 * similarity, "similarity": similarity, "truncated": truncated}
