"""Objectives by the names of their papers: settings of ``PolicyGradient``."""

from __future__ import annotations

from typing import Any

from retouch.objectives.policy_gradient import Kl, NoKl, PolicyGradient


def GRPO(*, clip: float, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """Group relative policy optimisation: PPO's clipped ratio on group advantages (DeepSeekMath, arXiv 2402.03300; Flow-GRPO, arXiv
    2505.05470).

    ``clip``: the ratio is clipped to [1 - clip, 1 + clip]; 1e-6 to 1e-4 is usual for denoising policies, whose log-probabilities
    are averaged over a latent, and 0.2 for tokens. ``kl``: weight of the KL to the reference, which is the closed form for
    denoising policies; for tokens give ``kl=Kl(kind="k3", weight=...)``. ``keys``: other keys of ``PolicyGradient``.

    Example::

        >>> retouch.GRPO(clip=1e-4).clip_high
        0.0001
    """
    return PolicyGradient(surrogate="clip", clip_low=clip, clip_high=clip, kl=_kl(kl), **keys)


def GSPO(*, clip: float, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """Group sequence policy optimisation: one ratio per chain or completion (arXiv 2507.18071). Arguments as for ``GRPO``.

    Example::

        >>> retouch.GSPO(clip=3e-4).surrogate
        'gspo'
    """
    return PolicyGradient(surrogate="gspo", clip_low=clip, clip_high=clip, kl=_kl(kl), **keys)


def CISPO(*, clip: float, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """The log-probability is weighted by the clipped ratio (MiniMax-M1, arXiv 2506.13585). The weight is at most 1 + ``clip``.

    Example::

        >>> retouch.CISPO(clip=0.2).clip_high
        0.2
    """
    return PolicyGradient(surrogate="cispo", clip_high=clip, kl=_kl(kl), **keys)


def REINFORCE(*, kl: float | Kl | NoKl = 0.0, **keys: Any) -> PolicyGradient:
    """Log-probability times advantage, without a ratio: one optimizer step per rollout (Williams 1992).

    Example::

        >>> retouch.REINFORCE(kl=0.01).kl.weight
        0.01
    """
    return PolicyGradient(surrogate="reinforce", kl=_kl(kl), **keys)


def _kl(kl: float | Kl | NoKl) -> Kl | NoKl:
    if isinstance(kl, Kl | NoKl):
        return kl
    return Kl(kind="closed", weight=float(kl)) if kl else NoKl()
