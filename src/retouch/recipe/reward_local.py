"""Sections of rewards that judge in the run's own process."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue

from retouch.config.section import ClassPath, Count, NonNegative, Section, Share
from retouch.recipe.reward_section import RewardDevice, RewardSection

Colour: TypeAlias = tuple[
    Annotated[int, Field(ge=0, le=255)], Annotated[int, Field(ge=0, le=255)], Annotated[int, Field(ge=0, le=255)]
]


class PlaygroundReward(RewardSection):
    """The playground's exact judge: instruction following, identity preservation, picture quality."""

    kind: Literal["playground"]


class PaintingReward(RewardSection):
    """The playground's exact judge of paintings: alignment with what was asked for, and picture quality."""

    kind: Literal["playground-paintings"]


class SignReward(RewardSection):
    """The playground's judge of signs: whether ink and paper are those of the reference."""

    kind: Literal["playground-signs"]


class PhotosReward(RewardSection):
    """How much of the source is still there, times how near the picture comes to a colour."""

    kind: Literal["photos"]
    colour: Colour
    """Red, green and blue of the colour to come near to, 0 to 255."""
    preserve: NonNegative = 1.0
    """Power to which the preservation is raised: 0 lets the source go, more keeps more of it."""


class ShareReward(RewardSection):
    """The share of one colour channel in all light of the picture."""

    kind: Literal["share"]
    channel: Literal["red", "green", "blue"] = "red"
    """Which channel."""


class CompressibilityReward(RewardSection):
    """How little space the picture takes as a JPEG."""

    kind: Literal["compressibility"]
    quality: Annotated[int, Field(ge=1, le=95)] = 95
    """The JPEG's."""


class ClipReward(RewardSection):
    """How far the picture shows what the task's own words say, by CLIP or SigLIP: ``cosine``, ``clip_score``, ``similarity``."""

    kind: Literal["clip"]
    path: str = "openai/clip-vit-base-patch32"
    """Folder of the weights, or their id in the Hugging Face cache; nothing is downloaded."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class PickScoreReward(RewardSection):
    """What people would pick, by a CLIP that was tuned on their choices."""

    kind: Literal["pickscore"]
    path: str = "yuvalkirstain/PickScore_v1"
    """Folder of the weights with tokenizer and image processor, or their id in the Hugging Face cache."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class AestheticReward(RewardSection):
    """LAION's aesthetic predictor, 0 to 10."""

    kind: Literal["aesthetic"]
    head: str
    """The predictor's layers, a safetensors file."""
    path: str = "openai/clip-vit-large-patch14"
    """The CLIP that the head was made for: a folder, or its id in the Hugging Face cache."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class DinoReward(RewardSection):
    """How much of the source is still there where nothing was to change, in the features of DINOv2."""

    kind: Literal["dino"]
    path: str = "facebook/dinov2-base"
    """Folder of the weights, or their id in the Hugging Face cache."""
    size: Count = 224
    """Pixels a side to which pictures are brought; a multiple of the model's patch."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class LpipsReward(RewardSection):
    """How much of the source is still there where nothing was to change: 1 less the LPIPS distance."""

    kind: Literal["lpips"]
    weights: str
    """AlexNet's features and LPIPS's own layers, a safetensors file."""
    size: Annotated[int, Field(ge=64)] = 256
    """Pixels a side to which pictures are brought."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class HpsReward(RewardSection):
    """What people prefer, by HPSv2, a CLIP that was tuned on their choices."""

    kind: Literal["hps"]
    path: str
    """Folder of the weights as a transformers CLIP in safetensors, with tokenizer and image processor."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class ImageRewardScore(RewardSection):
    """What people rank higher, by ImageReward, through its own package."""

    kind: Literal["image_reward"]
    weights: str | None = None
    """Its checkpoint, a file; null takes the published one, which the package downloads where it is not yet there."""
    cache: str | None = None
    """Folder in which the package keeps what it downloads; null takes its own."""
    device: RewardDevice = None
    """Where the model lies; null takes the run's device."""


class GenEvalReward(RewardSection):
    """GenEval's checks of objects, counts, colours and positions, by an open-vocabulary detector."""

    kind: Literal["geneval"]
    detector: str = "google/owlv2-base-patch16-ensemble"
    """Folder of an OWL-ViT, OWLv2 or Grounding DINO, or its id in the Hugging Face cache."""
    clip: str | None = None
    """The CLIP that names colours; null is for tasks that ask for none."""
    threshold: Share = 0.3
    """Confidence above which an object counts."""
    counting_threshold: Share = 0.4
    """The same in tasks of the tag "counting"."""
    device: RewardDevice = None
    """Where the models lie; null takes the run's device."""


class AppearanceReward(RewardSection):
    """Brightness, saturation, fine detail, and what the mask protects: to watch."""

    kind: Literal["appearance"]


class PaintedTextReward(RewardSection):
    """Text in the picture that nobody asked for, and that speaks to a judge: to watch."""

    kind: Literal["painted_text"]
    confidence: Share = 0.6
    """Of the reader in a line; those below are passed over."""


class PaddleOcr(Section):
    """PaddleOCR, which downloads its models unless they are in its cache; untested on the real ones."""

    kind: Literal["paddleocr"]
    model: str | None = None
    """Its recogniser by name, ``korean_PP-OCRv5_mobile_rec``; null is the package's default, which differs between its versions."""


class OcrReward(RewardSection):
    """Whether the text that was asked for stands in the picture, and no other."""

    kind: Literal["ocr"]
    reader: PaddleOcr | None = Field(default=None, exclude_if=lambda reader: reader is None)
    """What reads; null is RapidOCR, whose models came with it."""
    where: Literal["picture", "mask", "box"] = "picture"
    """Where the text is looked for: in all of the picture, in the task's mask, or in the mask's box, read as one line."""
    threads: Count = 1
    """CPU threads of the reader."""
    line_width: Count | None = Field(default=None, exclude_if=lambda width: width is None)
    """Width in px up to which RapidOCR fills up lines, at 48 px of height, to read them: less is faster; null is its own, 320."""


class ThinkReward(RewardSection):
    """Whether what a writer wrote is a thought and then an answer."""

    kind: Literal["thinking"]
    opening: str = "<think>"
    """Mark before the thought."""
    closing: str = "</think>"
    """Mark after it."""


class PromptQualityReward(RewardSection):
    """System C's five points for the prompt that a writer wrote: to watch, since who is paid for them learns to say "4k"."""

    kind: Literal["prompt_quality"]


class ImportedReward(RewardSection):
    """A reward of your own (``retouch.protocols.Reward``)."""

    kind: Literal["import"]
    class_: ClassPath = Field(alias="class")
    """The class, as ``package.module:Class``."""
    args: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of its constructor."""


LocalReward: TypeAlias = (
    PlaygroundReward
    | PaintingReward
    | SignReward
    | PhotosReward
    | ShareReward
    | CompressibilityReward
    | ClipReward
    | PickScoreReward
    | AestheticReward
    | DinoReward
    | LpipsReward
    | HpsReward
    | ImageRewardScore
    | GenEvalReward
    | AppearanceReward
    | PaintedTextReward
    | OcrReward
    | ThinkReward
    | PromptQualityReward
    | ImportedReward
)
