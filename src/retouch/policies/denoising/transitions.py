"""The recipe sections of transitions: the stochastic denoising step, which explores and whose log-probability is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.config.kinds import Kinds
from retouch.config.section import NonNegative, Section, Share

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from retouch.core.transitions import TransitionResult

TRANSITIONS = Kinds(
    "transition",
    {
        "sde": "retouch.policies.denoising.transitions:SDETransition",
        "dance": "retouch.policies.denoising.transitions:SDETransition",
        "cps": "retouch.policies.denoising.transitions:CPSTransition",
        "ode": "retouch.policies.denoising.transitions:ODETransition",
    },
)


class Transition(Section):
    """Base class of all transitions, built in or your own. Override ``step``, with the help of
    ``core/transitions.py::gaussian_step``."""

    stochastic: ClassVar[bool] = True
    """Whether the transition draws noise and has log-probabilities."""

    def step(
        self,
        x: Float[Tensor, "b ..."],
        velocity: Float[Tensor, "b ..."],
        sigma: Float[Tensor, " b"],
        sigma_next: Float[Tensor, " b"],
        *,
        sigma_max: Float[Tensor, ""],
        reduction: Literal["mean", "sum"],
        noise: Float[Tensor, "b ..."] | None = None,
        next: Float[Tensor, "b ..."] | None = None,
    ) -> TransitionResult:
        """Sample the next x from standard normal ``noise``, or evaluate a ``next`` that was reached, under the same distribution.

        Sigma runs from 1 to 0 and velocity is noise - data. ``sigma_max`` is the schedule's second sigma. ``reduction``: how the
        log-probability is reduced over a latent's elements.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no step")

    def noise_weights(self, sigmas: Float[Tensor, " n_plus_1"]) -> Float[Tensor, " n_minus_1"]:
        """The standard deviation of the noise of each step of a chain but the last, divided by the mean over these steps.

        Source: the noise-aware weighting of TempFlow-GRPO (arXiv 2508.04324, eq. 8).
        """
        before, after = sigmas[:-2], sigmas[1:-1]
        flat = sigmas.new_zeros(len(before), 1)
        made = self.step(flat, flat, before, after, sigma_max=sigmas[1], reduction="mean", next=flat)
        return made.step_std / made.step_std.mean()

    @property
    def exploration(self) -> float | None:
        """The noise level; with 0 the transition would not explore. None if the noise level is not known."""
        return None


class _Published(Transition):
    """A transition that is implemented in ``core/transitions.py``."""

    kind: Literal["sde", "cps", "dance", "ode"]

    def step(
        self,
        x: Float[Tensor, "b ..."],
        velocity: Float[Tensor, "b ..."],
        sigma: Float[Tensor, " b"],
        sigma_next: Float[Tensor, " b"],
        *,
        sigma_max: Float[Tensor, ""],
        reduction: Literal["mean", "sum"],
        noise: Float[Tensor, "b ..."] | None = None,
        next: Float[Tensor, "b ..."] | None = None,
    ) -> TransitionResult:
        from retouch.core.transitions import transition

        return transition(
            self.kind,
            x,
            velocity,
            sigma,
            sigma_next,
            noise_level=self.exploration or 0.0,
            sigma_max=sigma_max,
            reduction=reduction,
            noise=noise,
            next=next,
        )


class SDETransition(_Published):
    """``sde``: the stochastic step of Flow-GRPO (arXiv 2505.05470). ``dance``: the step of DanceGRPO (arXiv 2505.07818), whose
    noise does not depend on sigma.

    Example::

        >>> retouch.SDETransition(noise_level=0.7).kind
        'sde'
    """

    kind: Literal["sde", "dance"] = "sde"
    noise_level: NonNegative
    """Scale of the injected noise; 0.7 is usual, 1.0 to 1.5 for Qwen-Image."""

    @property
    def exploration(self) -> float | None:
        return self.noise_level


class CPSTransition(_Published):
    """The stochastic step that preserves the coefficients of the schedule (Flow-CPS, arXiv 2509.05952).

    Example::

        >>> retouch.CPSTransition(noise_level=0.5).stochastic
        True
    """

    kind: Literal["cps"] = "cps"
    noise_level: Share
    """Share of new noise in a step: from 0, no new noise, to 1, all noise is new."""

    @property
    def exploration(self) -> float | None:
        return self.noise_level


class ODETransition(_Published):
    """The deterministic Euler step: no exploration, no log-probabilities.

    Source: diffusers' FlowMatchEulerDiscreteScheduler.

    Example::

        >>> retouch.ODETransition().stochastic
        False
    """

    kind: Literal["ode"] = "ode"

    stochastic: ClassVar[bool] = False
