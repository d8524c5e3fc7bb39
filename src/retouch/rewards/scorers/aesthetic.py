"""LAION's aesthetic predictor: a few linear layers on CLIP's image embedding, trained on ratings from 1 to 10.

Source: github.com/christophschuhmann/improved-aesthetic-predictor; a reward of DDPO (arXiv 2305.13301).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.rewards.base import ModelReward
from retouch.rewards.facts import PathText
from retouch.rewards.weights import weights_digest
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from retouch.rewards.scorers.dual_encoder import DualEncoder


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
        from retouch.rewards.scorers.dual_encoder import DualEncoder

        layers = _layers(Path(self.head))
        return AestheticModel(DualEncoder(self.path, device=device), layers, head=self.head)

    @property
    def fingerprint(self) -> str:
        """Digests of the weights of the CLIP model and of the head."""
        return f"{self.model.encoder.fingerprint}, head {weights_digest(self.head)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0."""
        import torch

        scores = torch.zeros(len(samples))
        drawn = [row for row, sample in enumerate(samples) if sample.image is not None]
        if drawn:
            vectors = self.model.encoder.images([image for sample in samples if (image := sample.image) is not None])
            scores[drawn] = self.model.rate(vectors).clamp(0, 10)
        return {"aesthetic": scores}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return the head's rating, not clamped, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        return self.model.rate(self.model.encoder.embed_tensors(images)).to(images.device)


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

    def rate(self, vectors: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """Return the head's rating of each image embedding."""
        for weight, bias in self.layers:
            vectors = vectors @ weight.to(vectors.device).T + bias.to(vectors.device)
        return vectors[:, 0]


def _layers(path: Path) -> list[tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(f"head: {path} is not a safetensors file; give one with the layers of the aesthetic head") from None
    numbers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and name.split(".")[1].isdecimal()})
    names = {f"layers.{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not numbers or names != set(tensors):
        raise ValueError(f"{path} has {', '.join(sorted(tensors))}, not only layers.<n>.weight and layers.<n>.bias")
    layers = [(tensors[f"layers.{number}.weight"].float(), tensors[f"layers.{number}.bias"].float()) for number in numbers]
    width, fits = layers[0][0].shape[1], True
    for weight, bias in layers:
        fits &= weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1]
        width = weight.shape[0]
    if not fits or width != 1:
        shapes = [tuple(weight.shape) for weight, _ in layers]
        raise ValueError(f"the layers of {path} cannot be applied one after the other to give one number: {shapes}")
    return layers
