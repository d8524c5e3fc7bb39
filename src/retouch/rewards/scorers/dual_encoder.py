"""One interface for CLIP and SigLIP: a text encoder, an image encoder, and the cosine between their embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from PIL.Image import Image, Resampling
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    SiglipImageProcessorPil,
    SiglipModel,
)

from retouch.records.files import read_json
from retouch.rewards.weights import require_processors, weights_digest, weights_folder
from retouch.types import Sample

# Model, image processor, and whether texts are padded to the full length. SigLIP was trained with such padding.
_KINDS: dict[str, tuple[Any, Any, bool]] = {
    "clip": (CLIPModel, CLIPImageProcessorPil, False),
    "siglip": (SiglipModel, SiglipImageProcessorPil, True),
}
_ROWS = 16
_RESAMPLING = {int(Resampling.BILINEAR): "bilinear", int(Resampling.BICUBIC): "bicubic"}


@dataclass(frozen=True, slots=True, eq=False)
class TextEmbeddings:
    """Embeddings of texts. ``vectors``: unit vectors. ``truncated``: True if the text was longer than the model's maximum, so that
    its end was dropped."""

    vectors: Float[Tensor, "n d"]
    truncated: Bool[Tensor, " n"]


class DualEncoder:
    """A CLIP (arXiv 2103.00020) or SigLIP (arXiv 2303.15343) from a folder or the Hugging Face cache, frozen, in fp32.

    ``longest``: the maximum length of a text in tokens (CLIP 77, SigLIP 64), including the special tokens.
    Raises ValueError if there are no weights, no tokenizer or no image processor, or if the model is of another type.
    """

    def __init__(self, path: str | Path, *, device: torch.device | str = "cpu") -> None:
        folder = weights_folder(path)
        kind = read_json(folder / "config.json").get("model_type")
        if kind not in _KINDS:
            raise ValueError(f"{path} is a model of type {kind!r}; choose one of type {' or '.join(_KINDS)}")
        require_processors(folder, path=path)
        model_class, processor_class, self._pad = _KINDS[kind]
        self.device = torch.device(device)
        self.model = model_class.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        self.model.requires_grad_(False).eval().to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.processor = processor_class.from_pretrained(folder, local_files_only=True)
        self.longest: int = self.model.config.text_config.max_position_embeddings
        self._folder = folder

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights."""
        return f"weights {weights_digest(self._folder)}"

    @property
    def scale(self) -> float:
        """The trained logit scale, by which the model multiplies cosines."""
        return float(self.model.logit_scale.exp())

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> TextEmbeddings:
        """Return a unit vector for each text; equal texts are encoded once."""
        distinct = list(dict.fromkeys(texts))
        place = torch.tensor([distinct.index(text) for text in texts], dtype=torch.long)
        lengths = torch.tensor([len(self.tokenizer(text)["input_ids"]) for text in distinct])
        vectors = [self._text(text) for text in distinct]
        return TextEmbeddings(torch.cat(vectors)[place], (lengths > self.longest)[place])

    @torch.no_grad()
    def images(self, images: Sequence[Image]) -> Float[Tensor, "n d"]:
        """Return a unit vector for each image."""
        vectors = []
        for first in range(0, len(images), _ROWS):
            part = [image.convert("RGB") for image in images[first : first + _ROWS]]
            pixels = self.processor(images=part, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
            vectors.append(_unit(self.model.get_image_features(pixel_values=pixels.to(self.device))).cpu())
        return torch.cat(vectors)

    def embed_tensors(self, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n d"]:
        """Return a unit vector for each image, with gradient in the images, on the device of the model. ``images``: 0 to 1."""
        pixels = tensor_pixels(self.processor, images.to(self.device, torch.float32))
        return _unit(self.model.get_image_features(pixel_values=pixels))

    def cosines_of_tensors(self, texts: Sequence[str], images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, " n"]:
        """Return the cosine of each text with its image, with gradient in the images."""
        vectors = self.embed_tensors(images)
        return (self.texts(texts).vectors.to(vectors.device) * vectors).sum(dim=1)

    def cosines(self, texts: Sequence[str], images: Sequence[Image]) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
        """Return the cosine of each text with its image, -1 to 1, and for each text whether it was truncated."""
        encoded = self.texts(texts)
        return (encoded.vectors * self.images(images)).sum(dim=1).clamp(-1, 1), encoded.truncated

    def score_samples(self, samples: Sequence[Sample]) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Return for each sample the cosine of its instruction with its image, and 1 if the instruction was truncated, else 0.

        For a sample without an image, the cosine is the minimum, -1, and the second value is NaN.
        """
        cosines, truncated = torch.full((len(samples),), -1.0), torch.full((len(samples),), torch.nan)
        drawn = [(row, sample.task.instruction, sample.image) for row, sample in enumerate(samples) if sample.image is not None]
        if drawn:
            rows, texts, images = zip(*drawn, strict=True)
            found, too_long = self.cosines(texts, images)
            cosines[list(rows)], truncated[list(rows)] = found, too_long.float()
        return cosines, truncated

    def _text(self, text: str) -> Float[Tensor, "1 d"]:
        padding = "max_length" if self._pad else False
        tokens = self.tokenizer(text, padding=padding, truncation=True, max_length=self.longest, return_tensors="pt")
        fields = {"input_ids": tokens["input_ids"].to(self.device)}
        if not self._pad:
            fields["attention_mask"] = tokens["attention_mask"].to(self.device)
        return _unit(self.model.get_text_features(**fields)).cpu()


def tensor_pixels(processor: Any, images: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 y x"]:
    """Resize, crop and normalise tensors as the image processor of CLIP or SigLIP does, with gradient.

    ``images``: 0 to 1. The processor rounds to 8 bits after each pass of resizing, and this function does not: before the
    normalisation, values differ by at most 2 / 255. Raises ValueError if the processor has settings that are not supported.
    """
    size, resample = processor.size, _RESAMPLING.get(int(processor.resample))
    if resample is None or not (processor.do_resize and processor.do_rescale and processor.do_normalize):
        raise ValueError(
            "the image processor cannot be differentiated: it needs bilinear or bicubic resizing, rescaling and normalisation"
        )
    height, width = images.shape[-2:]
    shortest = size.get("shortest_edge")
    if shortest:
        scaled = shortest * max(height, width) // min(height, width)
        new = (shortest, scaled) if height <= width else (scaled, shortest)
    else:
        new = (size["height"], size["width"])
    for step in ((height, new[1]), new):  # PIL resizes the rows first, and clips after each of its two passes
        if step != tuple(images.shape[-2:]):
            images = functional.interpolate(images, step, mode=resample, align_corners=False, antialias=True).clamp(0, 1)
    if getattr(processor, "do_center_crop", False):
        crop = processor.crop_size["height"], processor.crop_size["width"]
        top, left = (new[0] - crop[0]) // 2, (new[1] - crop[1]) // 2
        if top < 0 or left < 0:
            raise ValueError(f"the image processor crops {crop} from images of {new}; its crop must not be larger than its size")
        images = images[..., top : top + crop[0], left : left + crop[1]]
    mean, std = (images.new_tensor(given)[:, None, None] for given in (processor.image_mean, processor.image_std))
    return (images - mean) / std


def _unit(features: Any) -> Float[Tensor, "n d"]:
    vectors: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return functional.normalize(vectors.float(), dim=1)
