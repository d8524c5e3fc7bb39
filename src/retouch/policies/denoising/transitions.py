"""The stochastic step of a denoising chain, as a recipe chooses it: it explores, and its log-probability is what trains."""

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
    """Base of all transitions, built in or your own. Override ``step``, with the help of ``core/transitions.py::gaussian_step``."""

    stochastic: ClassVar[bool] = True
    """Whether it draws noise and has log-probabilities."""

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

        Sigma runs from 1 to 0 and velocity is noise - data. ``sigma_max`` is the schedule's second sigma. ``reduction``: of the
        log-probability over a latent's elements.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no step")

    def noise_weights(self, sigmas: Float[Tensor, " n_plus_1"]) -> Float[Tensor, " n_minus_1"]:
        """The standard deviation of the noise of each step of a chain but the last, over their mean.

        Source: the noise-aware weighting of TempFlow-GRPO (arXiv 2508.04324, eq. 8).
        """
        before, after = sigmas[:-2], sigmas[1:-1]
        flat = sigmas.new_zeros(len(before), 1)
        made = self.step(flat, flat, before, after, sigma_max=sigmas[1], reduction="mean", next=flat)
        return made.step_std / made.step_std.mean()

    @property
    def exploration(self) -> float | None:
        """Its noise level, where 0 would explore nothing; None if that is not known."""
        return None


class _Published(Transition):
    """A transition of ``core/transitions.py``."""

    kind: str

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
    """``sde``: the stochastic step of Flow-GRPO (arXiv 2505.05470). ``dance``: DanceGRPO's (arXiv 2505.07818), whose noise does not
    depend on sigma.

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
    """From 0, no new noise, to 1, in which all noise of a step is new."""

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
