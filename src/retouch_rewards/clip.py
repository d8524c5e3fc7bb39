"""Rewards by a model of what people like, or of what an image shows: CLIP, SigLIP, PickScore, HPSv2, HPSv3, EditReward,
ImageReward, and LAION's aesthetic predictor (github.com/christophschuhmann/improved-aesthetic-predictor, a reward of DDPO, arXiv
2305.13301).

All of them read ``task.instruction``, never the prompt that a writer wrote. A sample without an image gets the worst score of each
column. ImageReward's package needs torchvision, so it cannot be installed next to a build of torch that has no matching
torchvision; it is imported when the model is loaded.
"""

from __future__ import annotations

import contextlib
import io
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from retouch.models.base import Bits
from retouch.rewards.base import Device, LoadedModel, PathText, RewardSection, score_images, source_image
from retouch.types import Column, Sample, Scores, Task
from retouch_rewards.weights import ModelReward, weights_digest

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from PIL.Image import Image
    from torch import Tensor

    from retouch_rewards.networks import AestheticModel, DualEncoder
    from retouch_rewards.reward_heads import RewardHeads


class _CosineReward(ModelReward):
    """Base class of the rewards that use the cosine of the text and the image embedding."""

    def load(self, device: torch.device | str) -> DualEncoder:
        """Load the model. Raises ValueError if its weights are not on this machine, or are of another type of model."""
        from retouch_rewards.networks import DualEncoder

        return DualEncoder(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights."""
        return str(self.model.fingerprint)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return the cosine, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        vectors = self.model.embed_tensors(images)
        texts = self.model.texts([task.instruction for task in tasks]).vectors.to(vectors.device)
        cosines: Tensor = (texts * vectors).sum(dim=1)
        return cosines.to(images.device)


class ClipReward(_CosineReward):
    """The cosine between instruction and image, by CLIP or SigLIP (the reward of the prompt enhancer in docs/coming-from.md).

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


class AestheticReward(ModelReward):
    """LAION's aesthetic predictor. Column ``aesthetic``, 0 to 10: the head's rating, clamped; about 4 to 7 for typical images.

    Source: LAION's improved aesthetic predictor, used for LAION-5B (Schuhmann et al. 2022, arXiv 2210.08402).

    Example::

        >>> retouch.rewards.Aesthetic(head="/models/aesthetic-head.safetensors").columns["aesthetic"].high
        10.0
    """

    kind: Literal["aesthetic"] = "aesthetic"
    head: PathText
    """A safetensors file with the layers of the predictor, ``layers.<n>.weight`` and ``layers.<n>.bias``. They are applied in the
    order of n, without activations. The published sac+logos+ava1-l14-linearMSE is a pickle: convert it if you trust its source."""
    path: PathText = "openai/clip-vit-large-patch14"
    """The CLIP model for which the head was trained: a folder, or its id in the Hugging Face cache."""

    columns: ClassVar[Mapping[str, Column]] = {"aesthetic": Column(0.0, 10.0)}
    cli_key = "head"

    def load(self, device: torch.device | str) -> AestheticModel:
        """Load the CLIP model and the head. Raises ValueError if there are no weights, or if the layers do not fit together."""
        from retouch_rewards.networks import AestheticModel

        return AestheticModel.open(self.path, self.head, device=device)

    @property
    def fingerprint(self) -> str:
        """Digests of the weights of the CLIP model and of the head."""
        return f"{self.model.encoder.fingerprint}, head {weights_digest(self.head)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0."""
        return {"aesthetic": self.model.score_samples(samples).clamp(0, 10)}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return the head's rating, not clamped, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        return self.model.rate(self.model.encoder.embed_tensors(images)).to(images.device)


_RANGE = 10.0  # in standard deviations, the unit of the model's scores; typical images score -2.5 to 2.5


class ImageRewardScore(RewardSection):
    """ImageReward (arXiv 2304.05977): predicts which image people rank higher, through the authors' own package.

    Column ``image_reward``, -10 to 10: the model's standardised score of the image for the instruction, clamped; NaN if the
    score is not finite.

    Example::

        >>> retouch.rewards.ImageRewardScore().columns["image_reward"].high
        10.0
    """

    kind: Literal["image_reward"] = "image_reward"
    weights: PathText | None = None
    """Path of the checkpoint ``ImageReward.pt``, which the package reads with ``torch.load``: take it only from a source that you
    trust. null uses the published checkpoint; the package downloads it, with its configuration, if it is not in the cache."""
    cache: PathText | None = None
    """Folder in which the package keeps its downloads; null uses the package's default folder."""
    device: Device = None
    """Where the model runs; null takes the run's device."""

    columns: ClassVar[Mapping[str, Column]] = {"image_reward": Column(-_RANGE, _RANGE)}
    cli_key = "weights"

    def load(self, device: torch.device | str) -> Any:
        """Load the package's model. Raises ValueError if the package is not installed, or if the checkpoint does not exist."""
        if self.weights is not None and not Path(self.weights).is_file():
            raise ValueError(f"weights: {self.weights} is not a file; give the path of ImageReward's checkpoint, ImageReward.pt")
        try:
            import ImageReward
        except ImportError as error:
            raise ValueError(
                f"ImageReward's package cannot be imported ({error}): pip install image-reward, and a torchvision that fits torch"
            ) from None
        with contextlib.redirect_stdout(io.StringIO()):  # the package prints while it loads
            return ImageReward.load(
                "ImageReward-v1.0" if self.weights is None else self.weights, device=str(device), download_root=self.cache
            )

    @property
    def fingerprint(self) -> str:
        """Digest of the checkpoint; for the published checkpoint, its name in the package."""
        return "ImageReward-v1.0" if self.weights is None else f"weights {weights_digest(self.weights)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores -10."""

        def score(task: Task, image: Image) -> float:
            found = float(self.model.score(task.instruction, image.convert("RGB")))
            return min(max(found, -_RANGE), _RANGE) if math.isfinite(found) else math.nan

        return {"image_reward": score_images(samples, score, missing=-_RANGE)}


_LIMIT = 20.0  # of a mu, which has no bound; HPSv3 gives images of today's models about 5 to 15


class _HeadsReward(ModelReward):
    """Base class of the rewards whose model is a Qwen-VL with heads; ``heads``: their names in the weights."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the weights, except for the heads, which are always in float32."""
    quantize: Bits | None = Field(default=None, exclude_if=operator.not_)
    """Quantise the linear layers of the blocks, as ``policy.base.quantize`` does; the scores then differ."""

    heads: ClassVar[tuple[str, ...]]

    def load(self, device: torch.device | str) -> RewardHeads:
        """Load the model. Raises ValueError if its weights are not on this machine, or are not those of the reward."""
        import torch

        from retouch_rewards.reward_heads import RewardHeads

        return RewardHeads(self.path, self.heads, device=device, dtype=getattr(torch, self.dtype), bits=self.quantize)

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights."""
        return f"{self.model.fingerprint}{f', {self.quantize}' if self.quantize else ''}"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the model."""
        yield LoadedModel(self.path, self.dtype, self.device, {"8bit": 0.6, "4bit": 0.4}.get(self.quantize or "", 1.0))

    def mu(self, prompt: str, task: Task, images: Sequence[Image], *, head: int = 0) -> float:
        """The score of a head, -20 to 20. ``prompt``: the name of a file in ``prompts``."""
        text = (resources.files("retouch_rewards") / "prompts" / f"{prompt}.txt").read_text(encoding="utf-8")
        found = self.model.score(images, text.replace("{text_prompt}", task.instruction), head=head)
        return min(max(found, -_LIMIT), _LIMIT) if math.isfinite(found) else math.nan


class HPSv3Reward(_HeadsReward):
    """HPSv3 (arXiv 2508.03789): predicts which image people prefer, with a Qwen2-VL-7B and a head, trained on human choices.

    Column ``hpsv3``, -20 to 20: the mean mu of the predicted preference, clamped; higher is better, and only differences have a
    meaning. NaN if it is not finite. The prompt is that of MizzenAI/HPSv3; HPSv3++ (PlantPotatoOnMoon/HPSv3-PlusPlus) leaves its
    part on text alignment out, and is another model.

    Example::

        >>> retouch.rewards.HPSv3().path
        'MizzenAI/HPSv3'
    """

    kind: Literal["hpsv3"] = "hpsv3"
    path: PathText = "MizzenAI/HPSv3"
    """Folder with HPSv3.safetensors and the configuration, tokenizer and image processor of Qwen/Qwen2-VL-7B-Instruct."""

    columns: ClassVar[Mapping[str, Column]] = {"hpsv3": Column(-_LIMIT, _LIMIT)}
    heads = ("rm_head",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores -20."""
        return {"hpsv3": score_images(samples, lambda task, image: self.mu("hpsv3", task, [image]), missing=-_LIMIT)}


class EditReward(_HeadsReward):
    """TIGER-Lab's EditReward (arXiv 2509.26346): predicts which edit people prefer, with a Qwen2.5-VL-7B or MiMo-VL-7B and two
    heads, trained on human choices. Each head has a prompt of its own, so an edit needs two forward passes.

    ``following``, -20 to 20: mu of the first head, how well the edit follows the instruction and leaves the rest alone.
    ``quality``, -20 to 20: mu of the second, visual quality. ``editreward``: the mean of both, as the published configurations
    pool them (``pooling_strategy: mean``; the default of the published class, which they override, is the minimum). Higher is
    better, and only differences have a meaning. NaN if a score is not finite.

    Example::

        >>> list(retouch.rewards.EditReward().columns)
        ['editreward', 'following', 'quality']
    """

    kind: Literal["editreward"] = "editreward"
    path: PathText = "TIGER-Lab/EditReward-Qwen2.5-VL-7B"
    """Folder with the weights of EditReward and the configuration, tokenizer and image processor of Qwen/Qwen2.5-VL-7B-Instruct (of
    XiaomiMiMo/MiMo-VL-7B-SFT-2508 for TIGER-Lab/EditReward-MiMo-VL-7B-SFT-2508)."""

    columns: ClassVar[Mapping[str, Column]] = {name: Column(-_LIMIT, _LIMIT) for name in ("editreward", "following", "quality")}
    heads = ("rm_heads.head_0", "rm_heads.head_1")
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image scores -20. Raises ValueError if a task has no source."""

        def score(name: str, head: int) -> Float[Tensor, " b"]:
            def one(task: Task, image: Image) -> float:
                return self.mu(f"editreward-{name}", task, [source_image(task), image], head=head)

            return score_images(samples, one, missing=-_LIMIT)

        following, quality = score("following", 0), score("quality", 1)
        return {"editreward": (following + quality) / 2, "following": following, "quality": quality}
