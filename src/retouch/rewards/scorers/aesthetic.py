"""LAION's aesthetic predictor: a few linear layers on CLIP's picture vector, trained on ratings from 1 to 10."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from retouch.rewards.scorers.two_towers import TwoTowers
from retouch.rewards.scorers.weights_folder import weights_digest
from retouch.types import Column, Sample, Scores


class AestheticReward:
    """Column ``aesthetic``, 0 to 10: the head's rating, about 4 to 7 for pictures in use; outside the range it is cut.

    ``path``: a CLIP model (openai/clip-vit-large-patch14 for the published heads). ``head``: its layers as a safetensors file with
    ``layers.<n>.weight`` and ``layers.<n>.bias``, applied in the order of n with nothing between them (the published
    sac+logos+ava1-l14-linearMSE is of this kind, and comes as a pickle: convert it where you trust it).
    A sample without a picture is the policy's own fault: 0. ValueError: no such weights, or layers that do not fit together.
    """

    columns: Mapping[str, Column] = {"aesthetic": Column(0.0, 10.0)}

    def __init__(
        self, head: str | Path, *, path: str | Path = "openai/clip-vit-large-patch14", device: torch.device | str = "cpu"
    ) -> None:
        self._head = head
        self._layers = _layers(Path(head))
        self._towers = TwoTowers(path, device=device)
        width = self._towers.model.config.projection_dim
        takes = self._layers[0][0].shape[1]
        if takes != width:
            raise ValueError(
                f"the head takes vectors of {takes} numbers, and {path} makes {width}; take the CLIP that it was made for"
            )

    @property
    def fingerprint(self) -> str:
        """The weights of the model and of the head."""
        return f"{self._towers.fingerprint}, head {weights_digest(self._head)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        scores = torch.zeros(len(samples))
        drawn = [row for row, sample in enumerate(samples) if sample.image is not None]
        if drawn:
            x = self._towers.images([image for sample in samples if (image := sample.image) is not None])
            for weight, bias in self._layers:
                x = x @ weight.T + bias
            scores[drawn] = x[:, 0].clamp(0, 10)
        return {"aesthetic": scores}


def _layers(path: Path) -> list[tuple[Float[Tensor, "o i"], Float[Tensor, " o"]]]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(f"{path} is no safetensors file; give the aesthetic head's layers in one") from None
    numbers = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("layers.") and name.split(".")[1].isdecimal()})
    names = {f"layers.{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not numbers or names != set(tensors):
        raise ValueError(f"{path} has {', '.join(sorted(tensors))}, not layers.<n>.weight and layers.<n>.bias")
    layers = [(tensors[f"layers.{number}.weight"].float(), tensors[f"layers.{number}.bias"].float()) for number in numbers]
    width, fits = layers[0][0].shape[1], True
    for weight, bias in layers:
        fits &= weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1]
        width = weight.shape[0]
    if not fits or width != 1:
        shapes = [tuple(weight.shape) for weight, _ in layers]
        raise ValueError(f"the layers of {path} do not follow each other down to one number: {shapes}")
    return layers
