"""The models of rewards: CLIP and SigLIP behind one interface, and open-vocabulary detectors (OWL-ViT, OWLv2, Grounding DINO)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from PIL.Image import Resampling
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    Owlv2ForObjectDetection,
    OwlViTForObjectDetection,
    OwlViTImageProcessorPil,
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
    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
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

    def cosines(self, texts: Sequence[str], images: Sequence[Image.Image]) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
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


Box = tuple[float, float, float, float]
_OWL: dict[str, Any] = {"owlvit": OwlViTForObjectDetection, "owlv2": Owlv2ForObjectDetection}


@dataclass(frozen=True, slots=True)
class Detection:
    """A detected object: its name, the detector's confidence (0 to 1), and its box (left, top, right, bottom) in pixels."""

    name: str
    confidence: float
    box: Box


class Detector(Protocol):
    """Finds objects by name."""

    def __call__(self, image: Image.Image, names: Sequence[str]) -> list[Detection]:
        """Return all candidate objects, sorted by falling confidence, each with its best-matching name. Boxes may overlap."""
        ...


def load_detector(path: str | Path, *, device: torch.device | str = "cpu") -> Detector:
    """Load a detector from a folder or the Hugging Face cache, frozen, in fp32.

    Raises ValueError if there are no weights, or if the model is of another type.
    """
    folder = weights_folder(path)
    kind = read_json(folder / "config.json").get("model_type")
    if kind in _OWL:
        return _Owl(folder, kind, device)
    if kind == "grounding-dino":
        return _GroundingDino(folder, device)
    raise ValueError(f"{path} is a model of type {kind!r}; choose one of type {', '.join(_OWL)} or grounding-dino")


class _Owl:
    """OWL-ViT and OWLv2: each name is a query "a photo of a ...". For OWLv2, the image is padded to a square (right or bottom).

    OWLv2's own processor smooths an image with SciPy before it is shrunk. Here, Pillow's bilinear filter smooths it, so pixels
    differ slightly.
    """

    def __init__(self, folder: Path, kind: str, device: torch.device | str) -> None:
        self.model = _frozen(_OWL[kind], folder, device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.processor = OwlViTImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self._square = kind == "owlv2"

    @torch.no_grad()
    def __call__(self, image: Image.Image, names: Sequence[str]) -> list[Detection]:
        seen = image.convert("RGB")
        if self._square:
            side = max(seen.size)
            padded = Image.new("RGB", (side, side))
            padded.paste(seen)
            seen = padded
        longest = self.model.config.text_config.max_position_embeddings
        queries = [f"a photo of a {name}" for name in names]
        tokens = self.tokenizer(queries, padding="max_length", truncation=True, max_length=longest, return_tensors="pt")
        pixels = self.processor(images=[seen], input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        device = self.model.device
        fields = {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}
        given = self.model(pixel_values=pixels.to(device), **fields)
        return _named(given.logits[0], given.pred_boxes[0], names, size=seen.size)


class _GroundingDino:
    """Grounding DINO: the names are joined to one text, "cat. dog."; a name's logit is the highest logit of its tokens."""

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        self.model = _frozen(GroundingDinoForObjectDetection, folder, device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.processor = GroundingDinoImageProcessorPil.from_pretrained(folder, local_files_only=True)

    @torch.no_grad()
    def __call__(self, image: Image.Image, names: Sequence[str]) -> list[Detection]:
        stop = self.tokenizer(".", add_special_tokens=False)["input_ids"]
        ids, places = [self.tokenizer.cls_token_id], []
        for name in names:
            words = self.tokenizer(name.lower(), add_special_tokens=False)["input_ids"]
            places.append(slice(len(ids), len(ids) + len(words)))
            ids += [*words, *stop]
        tokens = torch.tensor([[*ids, self.tokenizer.sep_token_id]], device=self.model.device)
        seen = self.processor(images=[image.convert("RGB")], input_data_format="channels_last", return_tensors="pt")
        fields = {name: seen[name].to(self.model.device) for name in ("pixel_values", "pixel_mask")}
        given = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **fields)
        logits = torch.stack([given.logits[0][:, place].amax(dim=1) for place in places], dim=1)
        return _named(logits, given.pred_boxes[0], names, size=image.size)


def suppress_overlaps(found: Sequence[Detection], *, above: float, overlap: float = 0.5, most: int = 16) -> list[Detection]:
    """Apply non-maximum suppression: for each name, keep at most ``most`` objects with a confidence above ``above``, and drop each
    object that overlaps a more confident object of the same name by more than ``overlap`` (intersection over union)."""
    kept: dict[str, list[Detection]] = {}
    for one in sorted(found, key=lambda one: -one.confidence):
        same = kept.setdefault(one.name, [])
        if one.confidence > above and len(same) < most and all(_overlap(one.box, other.box) <= overlap for other in same):
            same.append(one)
    return [one for same in kept.values() for one in same]


def _named(
    logits: Float[Tensor, "n k"], boxes: Float[Tensor, "n 4"], names: Sequence[str], *, size: tuple[int, int]
) -> list[Detection]:
    """Convert logits and boxes to objects. ``boxes``: (centre x, centre y, width, height) as fractions of ``size``, (width,
    height)."""
    confidence, label = logits.float().sigmoid().cpu().max(dim=1)
    centre, half = boxes.float().cpu()[:, :2], boxes.float().cpu()[:, 2:] / 2
    corners = torch.cat([centre - half, centre + half], dim=1) * torch.tensor([*size, *size], dtype=torch.float32)
    order = confidence.argsort(descending=True, stable=True).tolist()
    table = np.asarray(corners)
    return [Detection(names[int(label[row])], float(confidence[row]), tuple(map(float, table[row]))) for row in order]  # type: ignore[arg-type]


def _overlap(a: Box, b: Box) -> float:
    """Return the intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0.0) * max(height, 0.0)
    whole = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / whole if whole > 0 else 0.0


def _frozen(model_class: Any, folder: Path, device: torch.device | str) -> Any:
    model = model_class.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    return model.requires_grad_(False).eval().to(device)
