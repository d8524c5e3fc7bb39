"""The log-probabilities that an engine reports: weights that make the gradient unbiased, a limit, and metrics."""

import math
from dataclasses import replace

import pytest
import torch

import tiny_policies
import tiny_writers
import tiny_writing
from retouch.core.random import generator
from retouch.core.surrogates import importance_weights
from retouch.distributed.ranks import Ranks
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.autoregressive import check_mismatch
from retouch.policies.decoding import CachedDecoding
from retouch.policies.engine import EngineFault
from retouch.policies.rollout import CachedEngine
from retouch.run.metrics import completion_metrics

MASK = torch.tensor([[True, True, False], [True, False, False]])
OURS = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, 0.0, 0.0]])
THEIRS = torch.tensor([[-1.5, -1.8, 0.0], [-2.5, math.nan, 0.0]])


def test_importance_weights_are_the_probability_ratio_up_to_the_cap():
    found = importance_weights(OURS, THEIRS, MASK, cap=3.0)
    wanted = torch.tensor([[math.exp(0.5), math.exp(-0.2), 1.0], [3.0, 1.0, 1.0]])
    torch.testing.assert_close(found, wanted)


def test_importance_weights_make_averages_over_engine_samples_unbiased():
    ours, theirs = (torch.randn(50, generator=generator("spread", k), dtype=torch.float64).log_softmax(-1) for k in range(2))
    values = torch.randn(50, generator=generator("values"), dtype=torch.float64)
    weights = importance_weights(ours[None], theirs[None], torch.ones(1, 50, dtype=torch.bool), cap=math.inf)[0]
    torch.testing.assert_close((theirs.exp() * weights * values).sum(), (ours.exp() * values).sum())


@pytest.mark.parametrize(("limit", "stops"), [(0.91, False), (0.89, True)])
def test_a_mean_mismatch_above_the_limit_raises(limit, stops):
    """(0.5 + 0.2 + 2) / 3 = 0.9."""
    if not stops:
        check_mismatch(OURS, THEIRS, MASK, limit=limit)
        return
    with pytest.raises(EngineFault, match=r"by 0\.9 nats a token"):
        check_mismatch(OURS, THEIRS, MASK, limit=limit)


def test_a_nan_mismatch_raises():
    with pytest.raises(EngineFault, match="nan"):
        check_mismatch(OURS, THEIRS, torch.ones_like(MASK), limit=0.1)
    check_mismatch(OURS, THEIRS, torch.zeros_like(MASK), limit=1e-9)


class ShiftedLogProbs:
    """Generates what the model generates, and reports log-probabilities that are too high by ``by``."""

    exact = False

    def __init__(self, model, by):
        self.inner, self.by = CachedDecoding(model), by

    def __call__(self, batch, prompts, sampling):
        made = self.inner(batch, prompts, sampling)
        return replace(made, log_probs=made.log_probs + self.by)


def policy(by, *, cap):
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    return tiny_writing.policy(
        writer=writer, engine=ShiftedLogProbs(writer, by), sampling={"engine": CachedEngine(max_mismatch=1.0, truncate_at=cap)}
    )


@pytest.mark.parametrize(("by", "cap", "weight"), [(0.5, 3.0, math.exp(-0.5)), (-0.5, 1.2, 1.2), (0.5, None, 1.0)])
def test_importance_weights_scale_the_gradient_and_not_the_ratio(by, cap, weight):
    """Every token is off by the same amount, so the gradient is that of the model's own engine, times the weight."""
    found = []
    for way in (policy(by, cap=cap), tiny_writing.policy(writer=tiny_writers.writer(stop=tiny_writing.STOPS))):
        batch = tiny_writing.batch()
        trajectory = way.rollout(batch)
        advantages = torch.tensor([1.0, -1.0] * 3)
        objective = PolicyGradient(clip_low=0.2, clip_high=0.2)
        gradient, losses = tiny_policies.gradient(way, objective, tiny_policies.minibatch(batch, trajectory, advantages))
        assert max(float(loss.maxima["policy/ratio_max"]) for loss in losses) <= 1e-5
        found.append(gradient)
    for name, plain in found[1].items():
        torch.testing.assert_close(found[0][name], plain * weight, atol=1e-6, rtol=1e-3)


def test_completion_metrics_report_the_mismatch_of_an_engine():
    way = policy(0.5, cap=None)
    batch = tiny_writing.batch()
    trajectory = way.rollout(batch)
    told = completion_metrics(trajectory, ranks=Ranks())
    assert told["engine/mismatch"] == pytest.approx(0.5, abs=1e-5)
    assert told["engine/mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert told["engine/kl"] == pytest.approx(0.5, abs=1e-5)
    off = replace(trajectory, behaviour_log_probs=trajectory.log_probs - trajectory.ids * 1e-3)
    told = completion_metrics(off, ranks=Ranks())
    drawn = trajectory.ids[trajectory.mask] * 1e-3
    assert told["engine/mismatch"] == pytest.approx(drawn.mean().item(), rel=1e-3)
    assert told["engine/mismatch_max"] == pytest.approx(drawn.max().item(), rel=1e-3)
    assert told["engine/kl"] == pytest.approx(-drawn.mean().item(), rel=1e-3)
    alone = tiny_writing.policy(writer=way.model).rollout(batch)
    assert not any(name.startswith("engine/") for name in completion_metrics(alone, ranks=Ranks()))
