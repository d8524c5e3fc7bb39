"""How well an image matches the task's instruction, by the cosine of CLIP's two embeddings; and two CLIPs tuned on preferences.

All read ``task.instruction``, never what a writer made of it. A sample without an image gets the worst score of each column.
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
    """A reward from the cosine of a CLIP's two embeddings."""

    def load(self, device: torch.device | str) -> DualEncoder:
        """The model. ValueError: its weights are not on this machine, or are of another kind of model."""
        from retouch.rewards.scorers.dual_encoder import DualEncoder

        return DualEncoder(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """The model's weights."""
        return str(self.model.fingerprint)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The cosine, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        cosines: Tensor = self.model.cosines_of_tensors([task.instruction for task in tasks], images)
        return cosines.to(images.device)


class ClipReward(_CosineReward):
    """The cosine between instruction and image, by CLIP or SigLIP (the reward of system C).

    ``cosine``, -1 to 1: as it is, about 0.15 to 0.35 for ViT-B/32. ``clip_score``, 0 to 2.5: 2.5 max(cosine, 0) (CLIPScore, arXiv
    2104.08718). ``similarity``, 0 to 1: max(cosine, 0), for sums with other scores of that range. ``truncated``, a diagnostic: 1
    where the instruction is longer than the model reads (77 tokens for CLIP), so that its end counts for nothing.

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
        """Each column, (b,), float32."""
        cosine, truncated = self.model.score_samples(samples)
        similarity = cosine.clamp(min=0)
        return {"cosine": cosine, "clip_score": 2.5 * similarity, "similarity": similarity, "truncated": truncated}


class PickScoreReward(_CosineReward):
    """PickScore (arXiv 2305.01569): which image people would pick, by a CLIP ViT-H/14 that was tuned on their choices.

    Column ``pickscore``, 0 to 100: the model's scale (at most 100) times max(cosine, 0); about 18 to 24 for images in use.

    Example::

        >>> retouch.rewards.PickScore().path
        'yuvalkirstain/PickScore_v1'
    """

    kind: Literal["pickscore"] = "pickscore"
    path: PathText = "yuvalkirstain/PickScore_v1"
    """Folder of the weights, with tokenizer and image processor of laion/CLIP-ViT-H-14-laion2B-s32B-b79K, or their id in the
    Hugging Face cache."""

    columns: ClassVar[Mapping[str, Column]] = {"pickscore": Column(0.0, 100.0)}

    def load(self, device: torch.device | str) -> DualEncoder:
        """The model. ValueError: no weights, or a scale above 100, which is not PickScore's."""
        encoder = super().load(device)
        if encoder.scale > 100.01:
            raise ValueError(f"{self.path} scales cosines by {encoder.scale:.1f}, PickScore by at most 100; it is another model")
        return encoder

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32."""
        cosine, _ = self.model.score_samples(samples)
        return {"pickscore": (self.model.scale * cosine).clamp(0, 100)}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """``pickscore``, which also goes below 0, with gradient in the images."""
        return super().score_tensors(images, tasks) * self.model.scale


class HpsReward(_CosineReward):
    """HPSv2 (arXiv 2306.09341): which image people prefer, by a CLIP ViT-H/14 that was tuned on their choices.

    Column ``hps``, 0 to 1: max(cosine, 0); about 0.2 to 0.35 for images in use.

    Example::

        >>> list(retouch.rewards.Hps(path="/models/hps-v2.1").columns)
        ['hps']
    """

    kind: Literal["hps"] = "hps"
    path: PathText
    """Folder of the weights of HPSv2 or HPSv2.1 as a transformers CLIP in safetensors, with tokenizer and image processor. They are
    published for open_clip as pickles: convert them where you trust them (adams-story/HPSv2-hf is a conversion of HPSv2, itself to
    be saved again as safetensors)."""

    columns: ClassVar[Mapping[str, Column]] = {"hps": Column(0.0, 1.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32."""
        cosine, _ = self.model.score_samples(samples)
        return {"hps": cosine.clamp(0, 1)}
