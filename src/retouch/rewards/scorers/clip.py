"""Rewards by the cosine of CLIP's embeddings of the instruction and the image: CLIP, SigLIP, and two CLIPs tuned on preferences.

All of them read ``task.instruction``, never the prompt that a writer wrote. A sample without an image gets the worst score of each
column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.rewards.base import ModelReward
from retouch.rewards.facts import PathText
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from retouch.rewards.scorers.dual_encoder import DualEncoder


class _CosineReward(ModelReward):
    """Base class of the rewards that use the cosine of the text and the image embedding."""

    def load(self, device: torch.device | str) -> DualEncoder:
        """Load the model. Raises ValueError if its weights are not on this machine, or are of another type of model."""
        from retouch.rewards.scorers.dual_encoder import DualEncoder

        return DualEncoder(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights."""
        return str(self.model.fingerprint)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return the cosine, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        cosines: Tensor = self.model.cosines_of_tensors([task.instruction for task in tasks], images)
        return cosines.to(images.device)


class ClipReward(_CosineReward):
    """The cosine between instruction and image, by CLIP or SigLIP (the reward of system C).

    ``cosine``, -1 to 1: the cosine, about 0.15 to 0.35 for ViT-B/32. ``clip_score``, 0 to 2.5: 2.5 max(cosine, 0) (CLIPScore, arXiv
    2104.08718). ``similarity``, 0 to 1: max(cosine, 0), for sums with other scores of that range. ``truncated``, a diagnostic: 1 if
    the instruction is longer than the model's maximum (77 tokens for CLIP), so that its end is ignored.

    Example::

        >>> retouch.rewards.Clip().path
        'openai/clip-vit-base-patch32'
    """

    kind: Literal["clip"] = "clip"
    path: PathText = "openai/clip-vit-base-patch32"
    """Folder of the weights, or their id in the Hugging Face cache; nothing is downloaded."""

    columns: ClassVar[Mapping[str, Column]] = {
        "cosine": Column(-1.0, 1.0),
        "clip_score": Column(0.0, 2.5),
        "similarity": Column(0.0, 1.0),
        "truncated": Column(0.0, 1.0, diagnostic=True),
    }
    gradient_column = "cosine"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32."""
        cosine, truncated = self.model.score_samples(samples)
        similarity = cosine.clamp(min=0)
        return {"cosine": cosine, "clip_score": 2.5 * similarity, "similarity": similarity, "truncated": truncated}


class PickScoreReward(_CosineReward):
    """PickScore (arXiv 2305.01569): predicts which image people pick, with a CLIP ViT-H/14 that was fine-tuned on human choices.

    Column ``pickscore``, 0 to 100: the model's scale (at most 100) times max(cosine, 0); about 18 to 24 for typical images.

    Example::

        >>> retouch.rewards.PickScore().path
        'yuvalkirstain/PickScore_v1'
    """

    kind: Literal["pickscore"] = "pickscore"
    path: PathText = "yuvalkirstain/PickScore_v1"
    """Folder of the weights, with the tokenizer and the image processor of laion/CLIP-ViT-H-14-laion2B-s32B-b79K, or the id of the
    model in the Hugging Face cache."""

    columns: ClassVar[Mapping[str, Column]] = {"pickscore": Column(0.0, 100.0)}

    def load(self, device: torch.device | str) -> DualEncoder:
        """Load the model. Raises ValueError if there are no weights, or if the scale is above 100, so that it is not PickScore."""
        encoder = super().load(device)
        if encoder.scale > 100.01:
            raise ValueError(f"{self.path} scales cosines by {encoder.scale:.1f}, PickScore by at most 100; it is another model")
        return encoder

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32."""
        cosine, _ = self.model.score_samples(samples)
        return {"pickscore": (self.model.scale * cosine).clamp(0, 100)}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``pickscore``, not clamped (it may be negative), with gradient in the images."""
        return super().score_tensors(images, tasks) * self.model.scale


class HpsReward(_CosineReward):
    """HPSv2 (arXiv 2306.09341): predicts which image people prefer, with a CLIP ViT-H/14 that was fine-tuned on human choices.

    Column ``hps``, 0 to 1: max(cosine, 0); about 0.2 to 0.35 for typical images.

    Example::

        >>> list(retouch.rewards.Hps(path="/models/hps-v2.1").columns)
        ['hps']
    """

    kind: Literal["hps"] = "hps"
    path: PathText
    """Folder of the weights of HPSv2 or HPSv2.1 as a transformers CLIP in safetensors, with tokenizer and image processor. They are
    published for open_clip as pickles: convert them if you trust their source (adams-story/HPSv2-hf is a conversion of HPSv2, which
    must be saved again as safetensors)."""

    columns: ClassVar[Mapping[str, Column]] = {"hps": Column(0.0, 1.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32."""
        cosine, _ = self.model.score_samples(samples)
        return {"hps": cosine.clamp(0, 1)}
