"""Fits curves with two parameters to points (samples, share of the gap), and measures their error on a point that is left out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy import ndarray

GRID: ndarray = np.geomspace(10, 1e7, 1501)
"""Numbers of samples, 1 % apart."""


@dataclass(frozen=True, eq=False)
class Form:
    """A family of curves: linear combinations of the k basis functions ``basis(n, shape)``, (points, k), of samples n (points,).

    ``shapes``: the values that the fit tries for the parameter that is not linear.
    """

    name: str
    formula: str
    basis: Callable[[ndarray, float], ndarray]
    shapes: Sequence[float]


@dataclass(frozen=True)
class Curve:
    """A curve of a family: share = basis(n, shape) @ weights. ``residual``: root mean squared difference to the fitted points."""

    form: Form
    shape: float
    weights: ndarray
    residual: float

    def at(self, samples: Sequence[float] | ndarray) -> ndarray:
        """The shares of the gap after these numbers of samples."""
        found: ndarray = self.form.basis(np.asarray(samples, dtype=float), self.shape) @ self.weights
        return found

    def samples_for(self, share: float) -> float:
        """The smallest number of samples in `GRID` at which the curve reaches ``share``; infinite if it reaches it nowhere."""
        reached = self.at(GRID) >= share
        return float(GRID[int(reached.argmax())]) if reached.any() else float("inf")

    @property
    def parameters(self) -> tuple[float, float]:
        """The parameters a and b of the formula."""
        first = float(self.weights[0])
        return (first, float(self.weights[1])) if len(self.weights) == 2 else (first, self.shape)


LOGARITHM = Form("logarithm", "a + b ln n", lambda n, _: np.stack([np.ones_like(n), np.log(n)], axis=1), (0.0,))
POWER = Form("power law", "a n^b", lambda n, shape: (n**shape)[:, None], tuple(np.linspace(0, 2, 401).tolist()))
HYPERBOLA = Form(
    "hyperbola", "a n / (n + b)", lambda n, shape: (n / (n + shape))[:, None], tuple(np.geomspace(1, 1e6, 401).tolist())
)
FORMS = (LOGARITHM, POWER, HYPERBOLA)


def fit(form: Form, samples: Sequence[float], shares: Sequence[float]) -> Curve:
    """The curve of a family with the smallest mean squared difference to the points."""
    y = np.asarray(shares, dtype=float)
    bases, inverses = _bases(form, tuple(samples))
    weights = inverses @ y
    residuals = np.sqrt(np.mean((np.einsum("spk,sk->sp", bases, weights) - y) ** 2, axis=1))
    best = int(residuals.argmin())
    return Curve(form, form.shapes[best], weights[best], float(residuals[best]))


@lru_cache
def _bases(form: Form, samples: tuple[float, ...]) -> tuple[ndarray, ndarray]:
    """The basis at each shape, (shapes, points, k), and its pseudo-inverse."""
    n = np.array(samples, dtype=float)
    bases = np.stack([form.basis(n, shape) for shape in form.shapes])
    return bases, np.linalg.pinv(bases)


@dataclass(frozen=True)
class Extrapolation:
    """The prediction at the last point by a fit to the other points. ``residual``: of this fit, on the other points."""

    form: Form
    predicted: float
    measured: float
    residual: float


def extrapolated(form: Form, samples: Sequence[float], shares: Sequence[float]) -> Extrapolation:
    """Fit all points but the last, and predict the last."""
    curve = fit(form, samples[:-1], shares[:-1])
    return Extrapolation(form, float(curve.at(samples[-1:])[0]), float(shares[-1]), curve.residual)


def chosen(samples: Sequence[float], shares: Sequence[float]) -> Form:
    """The family that fits all points but the last best. The last point is not used, so the choice does not bias its error."""
    return min(FORMS, key=lambda form: extrapolated(form, samples, shares).residual)
