"""Find objects by name in images, with open-vocabulary detectors of transformers: OWL-ViT, OWLv2, Grounding DINO."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    Owlv2ForObjectDetection,
    OwlViTForObjectDetection,
    OwlViTImageProcessorPil,
)

from retouch.records.files import read_json
from retouch.rewards.weights import weights_folder

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
