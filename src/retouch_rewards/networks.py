"""The models of rewards: CLIP and SigLIP behind one interface, the aesthetic head, DINOv2, LPIPS on AlexNet, and open-vocabulary
detectors (OWL-ViT, OWLv2, Grounding DINO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from PIL.Image import Resampling
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    Owlv2ForObjectDetection,
    OwlViTForObjectDetection,
    OwlViTImageProcessorPil,
    SiglipImageProcessorPil,
    SiglipModel,
)

from retouch.records.files import read_json
from retouch.types import Sample
from retouch_rewards.weights import require_processors, weights_digest, weights_folder

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
        self.model = _frozen(model_class, folder, self.device)
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


class AestheticModel:
    """A CLIP model and the layers of a head, each (weight (o, i), bias (o,)).

    Raises ValueError if the head expects embeddings of another width.
    """

    def __init__(self, encoder: DualEncoder, layers: Sequence[tuple[Tensor, Tensor]], *, head: str) -> None:
        width, takes = encoder.model.config.projection_dim, layers[0][0].shape[1]
        if takes != width:
            raise ValueError(
                f"the head {head} expects embeddings of width {takes}, and the CLIP model has {width}; "
                "set path to the CLIP model for which the head was trained"
            )
        self.encoder, self.layers = encoder, layers

    @classmethod
    def open(cls, path: str, head: str, *, device: torch.device | str) -> "AestheticModel":
        """Load both. Raises ValueError if there are no weights, or if the layers of the head do not fit together."""
        try:
            tensors = load_file(head)
        except (OSError, SafetensorError):
            raise ValueError(f"head: {head} is not a safetensors file; give one with the layers of the aesthetic head") from None
        numbers = sorted(
            {int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and name.split(".")[1].isdecimal()}
        )
        names = {f"layers.{number}.{part}" for number in numbers for part in ("weight", "bias")}
        if not numbers or names != set(tensors):
            raise ValueError(f"{head} has {', '.join(sorted(tensors))}, not only layers.<n>.weight and layers.<n>.bias")
        layers = [(tensors[f"layers.{number}.weight"].float(), tensors[f"layers.{number}.bias"].float()) for number in numbers]
        width, fits = layers[0][0].shape[1], True
        for weight, bias in layers:
            fits &= weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1]
            width = weight.shape[0]
        if not fits or width != 1:
            shapes = [tuple(weight.shape) for weight, _ in layers]
            raise ValueError(f"the layers of {head} cannot be applied one after the other to give one number: {shapes}")
        return cls(DualEncoder(path, device=device), layers, head=head)

    def rate(self, vectors: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Return the head's rating of each image embedding."""
        for weight, bias in self.layers:
            vectors = vectors @ weight.to(vectors.device).T + bias.to(vectors.device)
        return vectors[:, 0]

    def score_samples(self, samples: Sequence[Sample]) -> Float[Tensor, " b"]:
        """Return the rating of each sample's image; 0 for a sample without an image."""
        scores = torch.zeros(len(samples))
        drawn = {row: sample.image for row, sample in enumerate(samples) if sample.image is not None}
        if drawn:
            scores[list(drawn)] = self.rate(self.encoder.images(list(drawn.values())))
        return scores


_MEAN = (0.485, 0.456, 0.406)  # ImageNet statistics, with which DINOv2 was trained
_STD = (0.229, 0.224, 0.225)


class Dino:
    """DINOv2 (arXiv 2304.07193) from a folder or the Hugging Face cache, frozen, in fp32.

    ``size``: the side in pixels to which images are resized.

    Raises ValueError if there are no DINOv2 weights, or if ``size`` is not a multiple of the patch size.
    """

    def __init__(self, path: str, *, size: int = 224, device: torch.device | str) -> None:
        folder = weights_folder(path)
        config = Dinov2Config.from_pretrained(folder, local_files_only=True)
        if config.model_type != "dinov2" or size % config.patch_size:
            raise ValueError(
                f"{path}, size {size}: give a DINOv2 model and a multiple of its patch size of {config.patch_size} pixels"
            )
        self.size, self.grid = size, size // config.patch_size
        self.model = _frozen(Dinov2Model, folder, device)

    @torch.no_grad()
    def patches(self, image: Image.Image) -> Float[Tensor, "n d"]:
        """Return a unit vector for each patch, in row-major order."""
        features = self.model(pixel_values=normalised_pixels([image], self.size).to(self.model.device)).last_hidden_state[0, 1:]
        return functional.normalize(features.double(), dim=1).cpu()

    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """Return a unit vector for each image."""
        return functional.normalize(self.states(images), dim=1)

    @torch.no_grad()
    def states(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """Return the class token of each image after the final norm, in fp32 on the CPU."""
        found = []
        for first in range(0, len(images), _ROWS):
            pixels = normalised_pixels(images[first : first + _ROWS], self.size).to(self.model.device)
            found.append(self.model(pixel_values=pixels).last_hidden_state[:, 0].float().cpu())
        return torch.cat(found)


def normalised_pixels(images: Sequence[Image.Image], size: int) -> Float[Tensor, "n 3 s s"]:
    """Resize images to ``size`` pixels a side (bicubic), and normalise them with ImageNet's mean and standard deviation."""
    small = [image.convert("RGB").resize((size, size), Resampling.BICUBIC) for image in images]
    pixels = torch.from_numpy(np.stack([np.asarray(image).astype(np.float32) for image in small]))
    return ((pixels / 255 - torch.tensor(_MEAN)) / torch.tensor(_STD)).permute(0, 3, 1, 2)


def unmasked_share(mask: Image.Image | None, size: tuple[int, int], dtype: torch.dtype) -> Float[Tensor, "h w"]:
    """Return the share of each location that the mask protects, 0 to 1; 1 without a mask. ``size``: (width, height)."""
    if mask is None:
        return torch.ones(size[1], size[0], dtype=dtype)
    return 1 - torch.from_numpy(np.array(mask.convert("L").resize(size, Resampling.BOX))).to(dtype) / 255


# (name, output channels, input channels, kernel, stride, padding, whether the maps are halved before the convolution)
_CONVOLUTIONS = (
    ("features.0", 64, 3, 11, 4, 2, False),
    ("features.3", 192, 64, 5, 1, 2, True),
    ("features.6", 384, 192, 3, 1, 1, True),
    ("features.8", 256, 384, 3, 1, 1, False),
    ("features.10", 256, 256, 3, 1, 1, False),
)
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)


class Lpips:
    """LPIPS (arXiv 1801.03924, version 0.1 on AlexNet), in fp32, of images that are resized to ``size`` pixels a side (bicubic).

    ``path``: a safetensors file. Raises ValueError if it does not exist or does not contain these weights.
    """

    def __init__(self, path: str, *, size: int, device: torch.device | str) -> None:
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError):
            raise ValueError(
                f"weights: {path} is not a safetensors file; LPIPS needs one with AlexNet's features and LPIPS's linear layers"
            ) from None
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (name, outputs, inputs, kernel, _, _, _) in enumerate(_CONVOLUTIONS):
            shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
            shapes[f"{name}.bias"] = (outputs,)
            shapes[f"lin{layer}.model.1.weight"] = (1, outputs, 1, 1)
        wrong = [name for name, shape in shapes.items() if name not in tensors or tuple(tensors[name].shape) != shape]
        if wrong:
            raise ValueError(
                f"{path} lacks {', '.join(wrong)}, or has them in other shapes; these are not weights of LPIPS on AlexNet"
            )
        self.size, self.device = size, device
        self.weights = {name: tensors[name].float().to(device) for name in shapes}

    @torch.no_grad()
    def distance(self, a: Image.Image, b: Image.Image, mask: Image.Image | None) -> float:
        """See ``LpipsReward.distance``."""
        total = 0.0
        for layer, (left, right) in enumerate(zip(self._maps(a), self._maps(b), strict=True)):
            linear = self.weights[f"lin{layer}.model.1.weight"]
            difference = functional.conv2d((left - right).square()[None], linear)[0, 0].cpu()
            weight = unmasked_share(mask, (difference.shape[1], difference.shape[0]), torch.float32)
            total += float((weight * difference).sum() / weight.sum()) if weight.sum() > 0 else 0.0
        return total

    def _maps(self, image: Image.Image) -> list[Float[Tensor, "c h w"]]:
        """Return the five feature maps, each normalised to unit length at every location."""
        small = image.convert("RGB").resize((self.size, self.size), Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(small).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
        shift, scale = (torch.tensor(values).view(3, 1, 1) for values in (_SHIFT, _SCALE))
        x = ((pixels - shift) / scale).to(self.device)[None]
        maps = []
        for name, _, _, _, stride, padding, halved in _CONVOLUTIONS:
            if halved:
                x = functional.max_pool2d(x, kernel_size=3, stride=2)
            x = functional.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], stride, padding).relu()
            maps.append((x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10))[0])
        return maps


Box = tuple[float, float, float, float]
_OWL: dict[str, Any] = {"owlvit": OwlViTForObjectDetection, "owlv2": Owlv2ForObjectDetection}


@dataclass(frozen=True, slots=True)
class Detection:
    """A detected object: its name, the detector's confidence (0 to 1), and its box (left, top, right, bottom) in pixels."""

    name: str
    confidence: float
    box: Box


Detector: TypeAlias = Callable[[Image.Image, Sequence[str]], list[Detection]]
"""Finds objects by name: all candidates, sorted by falling confidence, each with its best-matching name. Boxes may overlap."""


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
