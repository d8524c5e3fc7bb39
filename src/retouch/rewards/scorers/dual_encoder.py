"""CLIP and SigLIP behind one interface: a text encoder, an image encoder, and the cosine between their embeddings."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from PIL.Image import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    SiglipImageProcessorPil,
    SiglipModel,
)

from retouch.rewards.weights import weights_digest, weights_folder
from retouch.types import Sample

# Model, image processor, and whether texts are padded to the full length, as the model was trained.
_KINDS: dict[str, tuple[Any, Any, bool]] = {
    "clip": (CLIPModel, CLIPImageProcessorPil, False),
    "siglip": (SiglipModel, SiglipImageProcessorPil, True),
}
_ROWS = 16


@dataclass(frozen=True, slots=True, eq=False)
class TextEmbeddings:
    """``vectors``: of unit length. ``truncated``: which texts are longer than the model reads, so that their end was dropped."""

    vectors: Float[Tensor, "n d"]
    truncated: Bool[Tensor, " n"]


class DualEncoder:
    """A CLIP (arXiv 2103.00020) or SigLIP (arXiv 2303.15343) from a folder or the Hugging Face cache, frozen, in fp32.

    ``longest``: how many tokens of a text it reads (CLIP 77, SigLIP 64), beginning and end of text included.
    ValueError: no weights, or those of another kind of model.
    """

    def __init__(self, path: str | Path, *, device: torch.device | str = "cpu") -> None:
        folder = weights_folder(path)
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in _KINDS:
            raise ValueError(f"{path} is a model of type {kind!r}; choose one of type {' or '.join(_KINDS)}")
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
        """The model's weights."""
        return f"weights {weights_digest(self._folder)}"

    @property
    def scale(self) -> float:
        """The factor by which the model was trained to multiply cosines."""
        return float(self.model.logit_scale.exp())

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> TextEmbeddings:
        """A unit vector for each text; equal texts are encoded once."""
        distinct = list(dict.fromkeys(texts))
        place = torch.tensor([distinct.index(text) for text in texts], dtype=torch.long)
        lengths = torch.tensor([len(self.tokenizer(text)["input_ids"]) for text in distinct])
        vectors = [self._text(text) for text in distinct]
        return TextEmbeddings(torch.cat(vectors)[place], (lengths > self.longest)[place])

    @torch.no_grad()
    def images(self, images: Sequence[Image]) -> Float[Tensor, "n d"]:
        """A unit vector for each image."""
        vectors = []
        for first in range(0, len(images), _ROWS):
            part = [image.convert("RGB") for image in images[first : first + _ROWS]]
            pixels = self.processor(images=part, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
            vectors.append(_unit(self.model.get_image_features(pixel_values=pixels.to(self.device))))
        return torch.cat(vectors)

    def cosines(self, texts: Sequence[str], images: Sequence[Image]) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
        """The cosine of each text with its image, -1 to 1, and which texts were truncated."""
        encoded = self.texts(texts)
        return (encoded.vectors * self.images(images)).sum(dim=1).clamp(-1, 1), encoded.truncated

    def score_samples(self, samples: Sequence[Sample]) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """The cosine of each sample's instruction with its image, and 1 where the instruction was truncated, else 0.

        A sample without an image has the least cosine, -1, and NaN.
        """
        cosines, truncated = torch.full((len(samples),), -1.0), torch.full((len(samples),), torch.nan)
        drawn = [(row, sample.task.instruction, sample.image) for row, sample in enumerate(samples) if sample.image is not None]
        if drawn:
            rows, texts, images = zip(*drawn, strict=True)
            found, cut = self.cosines(texts, images)
            cosines[list(rows)], truncated[list(rows)] = found, cut.float()
        return cosines, truncated

    def _text(self, text: str) -> Float[Tensor, "1 d"]:
        padding = "max_length" if self._pad else False
        tokens = self.tokenizer(text, padding=padding, truncation=True, max_length=self.longest, return_tensors="pt")
        fields = {"input_ids": tokens["input_ids"].to(self.device)}
        if not self._pad:
            fields["attention_mask"] = tokens["attention_mask"].to(self.device)
        return _unit(self.model.get_text_features(**fields))


def _unit(features: Any) -> Float[Tensor, "n d"]:
    vectors: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return torch.nn.functional.normalize(vectors.float(), dim=1).cpu()
