"""Weights and an input for the network of FID, from a formula, so that the outputs of a published implementation can be stored."""

import torch
from torch import Tensor

from retouch_bench.inception import inception_shapes


def weights() -> dict[str, Tensor]:
    """All tensors of the network, the classifier included. They keep the scale of the activations about constant."""
    shapes = {**inception_shapes(), "fc.weight": (1008, 2048), "fc.bias": (1008,)}
    return {name: _tensor(number, name, shape) for number, (name, shape) in enumerate(sorted(shapes.items()))}


def _tensor(number: int, name: str, shape: tuple[int, ...]) -> Tensor:
    count = int(torch.tensor(shape).prod())
    places = torch.arange(count, dtype=torch.float64)
    noise = 2 * torch.frac(torch.sin(12.9898 * places + 78.233 * (number + 1)).abs() * 43758.5453) - 1  # uniform, -1 to 1
    if name.endswith("conv.weight"):
        values = noise * (6 / (count / shape[0])) ** 0.5
    elif name.endswith("bn.weight"):
        values = 1 + 0.2 * noise
    elif name.endswith("running_var"):
        values = 1 + 0.5 * noise
    else:
        values = 0.1 * noise
    return values.reshape(shape).float()


def pixels() -> Tensor:
    """One image of 30 x 40 px with values from 0 to 1, (1, 3, 30, 40)."""
    values = torch.arange(3 * 30 * 40, dtype=torch.float64)
    return (0.5 + 0.5 * torch.sin(values * 0.37 + (values / 40).floor() * 0.11)).reshape(1, 3, 30, 40).float()


def summary(output: Tensor) -> list[float]:
    """Mean, standard deviation, and the corners of some channels of the output of a block, which show how its edges are padded."""
    some = output[0, :: max(1, output.shape[1] // 4)]
    values = [output.mean(), output.std(), *some[:, 0, 0], *some[:, -1, -1], *some[:, output.shape[2] // 2, 0]]
    return [round(float(value), 6) for value in values]
