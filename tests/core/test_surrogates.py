"""Surrogates, loss weights and the sampled distribution of tokens, against textbook formulas and other libraries."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.distributions import Categorical
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from retouch.core.surrogates import (
    approx_kl,
    bernoulli_kl,
    cispo,
    clip_fraction,
    clipped_surrogate,
    dppo,
    loss_weights,
    reinforce,
    sequence_log_ratio,
)
from retouch.core.tokens import entropy, gather_logits, log_prob, mask_to_ids, sample_tokens, top_k_top_p_mask, warp_logits

# Surrogates against the textbook formulas in ratio space, their closed-form gradients, and that maske

B, T = 6, 40
REFUSED = (ValueError, TypeCheckError)  # the second where annotations are checked at run time


def draw(spread: float = 0.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    log_ratio = spread * torch.randn(B, T, generator=generator)
    advantages = torch.randn(B, T, generator=generator)
    advantages[0, :5] = 0
    return log_ratio.requires_grad_(), advantages


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), of, retain_graph=True)
    return grad


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (1e-3, 2e-3)])
@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
def test_clipped_surrogate_equals_ppo(low, high, dual):
    log_ratio, advantages = draw(spread=0.5 if high > 0.1 else 2e-3)
    ratio = log_ratio.exp()
    expected = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        expected = torch.where(advantages < 0, torch.minimum(expected, -dual * advantages), expected)
    ours = clipped_surrogate(log_ratio, advantages, low=low, high=high, dual=dual)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradient(ours, log_ratio), gradient(expected, log_ratio))
    assert 0.1 < (gradient(ours, log_ratio) == 0).float().mean() < 0.9


def test_a_huge_ratio_that_is_clipped_has_no_nan_gradient():
    log_ratio = torch.tensor([[200.0, 200.0, -200.0, 200.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 0.0, -1.0, -1.0]])
    loss = clipped_surrogate(log_ratio, advantages, low=0.2, high=0.25, dual=3.0)
    torch.testing.assert_close(loss, torch.tensor([[-1.25, 0.0, 0.8, 3.0]]))
    assert gradient(loss, log_ratio).tolist() == [[0, 0, 0, 0]]
    single = clipped_surrogate(log_ratio[:, :3], advantages[:, :3], low=0.2, high=0.25)
    assert torch.equal(single, loss[:, :3])


def test_a_nan_in_an_unmasked_action_gives_a_nan_loss():
    log_ratio, advantages = torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2)
    assert clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2).isnan().tolist() == [[True, False]]
    assert reinforce(log_ratio, advantages).isnan().tolist() == [[True, False]]
    assert cispo(log_ratio, log_ratio, advantages, low=None, high=4.0).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("low", [None, 0.2])
def test_cispo_gradient_is_the_clamped_ratio_times_reinforce(low):
    log_ratio, advantages = draw()
    log_probs = (log_ratio.detach() - 1).requires_grad_()
    ours = cispo(log_ratio, log_probs, advantages, low=low, high=0.3)
    ratio = log_ratio.detach().exp().clamp(0 if low is None else 1 - low, 1.3)
    torch.testing.assert_close(ours, -ratio * advantages * log_probs)
    torch.testing.assert_close(gradient(ours, log_probs), -ratio * advantages)
    assert not ours.sum().isnan()
    assert torch.autograd.grad(cispo(log_ratio, log_probs, advantages, low=low, high=0.3).sum(), log_ratio, allow_unused=True) == (
        None,
    )


def test_at_ratio_one_every_surrogate_has_the_policy_gradient():
    log_probs, advantages = draw()
    log_ratio = log_probs - log_probs.detach()
    sequence = sequence_log_ratio(log_ratio, torch.ones(B, T, dtype=torch.bool), gradient="token")
    plain = reinforce(log_probs, advantages)
    torch.testing.assert_close(plain, -advantages * log_probs)
    for loss in (
        plain,
        clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2, dual=3.0),
        cispo(log_ratio, log_probs, advantages, low=None, high=0.2),
        clipped_surrogate(sequence, advantages, low=3e-4, high=4e-4),
        dppo(log_ratio, torch.zeros(B, T), advantages, limit=1e-6)[0],
    ):
        assert torch.equal(gradient(loss, log_probs), -advantages)


SURROGATES = {
    "clipped": lambda x, a, m: clipped_surrogate(x, a, low=0.2, high=0.2, mask=m),
    "cispo": lambda x, a, m: cispo(x, x, a, low=0.2, high=0.2, mask=m),
    "reinforce": lambda x, a, m: reinforce(x, a, mask=m),
    "dppo": lambda x, a, m: dppo(x, x, a, limit=0.2, mask=m)[0],
    "dppo, left out": lambda x, a, m: dppo(x, x, a, limit=0.2, mask=m)[1] + 0 * x.nan_to_num(0, 0, 0),
    "gspo": lambda x, a, m: clipped_surrogate(sequence_log_ratio(x, m), a, low=0.2, high=0.2, mask=m),
    "gspo-token": lambda x, a, m: clipped_surrogate(sequence_log_ratio(x, m, gradient="token"), a, low=0.2, high=0.2, mask=m),
    "clip_fraction": lambda x, a, m: clip_fraction(x, a, low=0.2, high=0.2, mask=m) + 0 * x.nan_to_num(0, 0, 0),
    "approx_kl": lambda x, a, m: approx_kl(x, mask=m) + 0 * x.nan_to_num(0, 0, 0),
}


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf, 1e4, 0.0])
def test_masked_actions_have_no_loss_and_no_gradient(name, padding):
    clean, advantages = draw()
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[1] = False
    padded = clean.detach().masked_fill(~mask, padding).requires_grad_()
    loss = SURROGATES[name](padded, advantages, mask)
    assert (loss[~mask] == 0).all()
    assert (gradient(loss, padded)[~mask] == 0).all()
    other = clean.detach().masked_fill(~mask, 0.1).requires_grad_()
    same = SURROGATES[name](other, advantages, mask)
    assert torch.equal(loss, same)
    assert torch.equal(gradient(SURROGATES[name](padded, advantages, mask), padded), gradient(same, other))


def test_dppo_leaves_out_actions_at_the_limit_that_moved_with_their_advantage():
    """The last one has a ratio above the largest float."""
    ratios, advantages = [2.0, 0.5, 2.0, 0.5, 2.0, 1.0], [3.0, -3.0, -3.0, 3.0, 3.0, 3.0, 3.0]
    log_ratio = torch.tensor([[*(math.log(ratio) for ratio in ratios), 200.0]], requires_grad=True)
    divergence = torch.tensor([[0.25, 0.5, 0.5, 0.5, 0.2, 0.5, 0.5]])
    loss, left_out = dppo(log_ratio, divergence, torch.tensor([advantages]), limit=0.25)
    torch.testing.assert_close(loss, torch.tensor([[0.0, 0.0, 6.0, -1.5, -6.0, -3.0, 0.0]]))
    assert left_out.tolist() == [[True, True, False, False, False, False, True]]
    assert gradient(loss, log_ratio)[left_out].tolist() == [0, 0, 0]


def test_bernoulli_kl_equals_torch_distributions():
    p, q = torch.tensor([[0.2, 0.99, 0.5, 1e-4]]), torch.tensor([[0.3, 0.75, 0.5, 1e-2]])
    expected = torch.distributions.kl_divergence(torch.distributions.Bernoulli(p), torch.distributions.Bernoulli(q))
    torch.testing.assert_close(bernoulli_kl(p.log(), q.log()), expected, rtol=1e-4, atol=1e-6)
    certain = bernoulli_kl(
        torch.zeros(1, 3), torch.tensor([[0.0, math.log(0.5), math.nan]]), mask=torch.tensor([[True, True, False]])
    )
    torch.testing.assert_close(certain, torch.tensor([[0.0, math.log(2.0), 0.0]]))


def test_sequence_log_ratio_is_the_mean_over_the_row():
    log_ratio, _ = draw()
    mask = torch.zeros(B, T, dtype=torch.bool)
    for row in range(B):
        mask[row, : 3 + 5 * row] = True
    mask[2] = False
    for gradient_kind in ("sequence", "token"):
        ours = sequence_log_ratio(log_ratio, mask, gradient=gradient_kind)
        for row in range(B):
            own = log_ratio[row][mask[row]]
            torch.testing.assert_close(ours[row][mask[row]], own.mean().expand_as(own))
        assert (ours[~mask] == 0).all()


def test_clip_fraction_is_1_where_clipping_sets_the_gradient_to_0():
    log_ratio, advantages = draw()
    grad = gradient(clipped_surrogate(log_ratio, advantages, low=0.2, high=0.3), log_ratio)
    cut = clip_fraction(log_ratio, advantages, low=0.2, high=0.3)
    assert torch.equal(cut.bool(), (grad == 0) & (advantages != 0))
    assert 0.1 < cut.mean() < 0.6
    assert not cut.requires_grad


def test_half_precision_is_computed_in_fp32():
    log_ratio, advantages = (each.bfloat16() for each in draw())
    ours = clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, clipped_surrogate(log_ratio.float(), advantages.float(), low=0.2, high=0.2))


# Loss weights

MODES = [("token", None), ("sequence", None), ("dr_grpo", 16)]
properties = settings(deadline=None, max_examples=60, derandomize=True)


@st.composite
def batches(draw):
    b, t = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    mask = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=b, max_size=b)))
    return mask, torch.tensor(draw(st.lists(st.booleans(), min_size=b, max_size=b)))


@properties
@given(batch=batches(), mode=st.sampled_from(MODES))
def test_weights_sum_to_1_and_are_0_for_invalid_rows_and_masked_actions(batch, mode):
    mask, valid = batch
    normalise, max_length = mode
    weights = loss_weights(mask, valid, normalise=normalise, max_length=max_length)
    live = mask & valid[:, None]
    assert weights.isfinite().all()
    assert (weights[~live] == 0).all()
    assert (weights[live] > 0).all()
    if normalise != "dr_grpo":
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0 if live.any() else 0.0))


@properties
@given(batch=batches(), mode=st.sampled_from(MODES), data=st.data())
def test_weights_do_not_depend_on_the_ranks(batch, mode, data):
    mask, valid = batch
    normalise, max_length = mode
    cut = data.draw(st.integers(0, len(mask)))
    ranks = [(mask[:cut], valid[:cut]), (mask[cut:], valid[cut:])]
    counts = []  # the counts of both ranks, which each of them divides by
    for m, v in ranks:
        loss_weights(m, v, normalise=normalise, max_length=max_length, over_ranks=lambda count: counts.append(count) or count)
    parts = [loss_weights(m, v, normalise=normalise, max_length=max_length, over_ranks=lambda count: sum(counts)) for m, v in ranks]
    assert torch.equal(torch.cat(parts), loss_weights(mask, valid, normalise=normalise, max_length=max_length))


def test_each_normalisation_equals_its_published_mean():
    """A valid row without actions does not dilute the mean over sequences."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    valid = torch.tensor([True, True, False])
    loss = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 99.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
    expected = {"token": 20 / 5, "sequence": (10 / 4 + 10 / 1) / 2, "dr_grpo": 20 / (2 * 16)}
    for normalise, max_length in MODES:
        weights = loss_weights(mask, valid, normalise=normalise, max_length=max_length)
        assert float((weights * loss).sum()) == pytest.approx(expected[normalise])
    empty = torch.tensor([[True, True], [False, False]])
    assert loss_weights(empty, torch.tensor([True, True]), normalise="sequence").tolist() == [[0.5, 0.5], [0, 0]]


LOG_RATIO, EVERY = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


def weights_with(**options):
    return loss_weights(EVERY, EVERY[:, 0], **options)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: weights_with(normalise="dr_grpo"), "needs max_length"),
        (lambda: weights_with(normalise="token", max_length=3), "only it takes one"),
        (lambda: weights_with(normalise="dr_grpo", max_length=0), "at least 1"),
        (lambda: weights_with(normalise="mean"), r"'token', 'sequence' or 'dr_grpo'|Type-check"),
        (lambda: clipped_surrogate(LOG_RATIO, LOG_RATIO, low=0.2, high=0.2, dual=1.0), "dual"),
        (lambda: cispo(LOG_RATIO, LOG_RATIO, LOG_RATIO, low=1.5, high=0.2), "low"),
        (lambda: sequence_log_ratio(LOG_RATIO, EVERY, gradient="row"), r"'sequence' or 'token'|Type-check"),
    ],
)
def test_invalid_bounds_and_normalisations_raise(call, told):
    with pytest.raises(REFUSED, match=told):
        call()


# The sampled distribution


def logits(rows=6, size=13, seed=0, spread=3.0):
    return spread * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([None, 1, 3, 12, 13, 40]),
    top_p=st.sampled_from([None, 0.05, 0.5, 0.9, 0.999, 1.0]),
)
def test_sampling_distribution_equals_the_warpers_of_transformers(seed, temperature, top_k, top_p):
    raw = logits(seed=seed)
    theirs = TemperatureLogitsWarper(temperature)(None, raw)
    if top_k is not None:
        theirs = TopKLogitsWarper(top_k)(None, theirs)
    if top_p is not None:
        # Where the probabilities sum to top_p within the rounding of fp32, rounding decides whether an id stays.
        assume(top_p == 1 or ((theirs.double().softmax(-1).sort().values.cumsum(-1) - (1 - top_p)).abs() > 1e-6).all())
        theirs = TopPLogitsWarper(top_p)(None, theirs)
    ours = warp_logits(raw, torch.ones(1, 13, dtype=torch.bool), temperature=temperature)
    stays = top_k_top_p_mask(ours, top_k=top_k, top_p=top_p)
    assert torch.equal(stays, theirs > -torch.inf)
    support = mask_to_ids(stays)
    ids = theirs.argmax(-1)
    twin = Categorical(logits=theirs)
    torch.testing.assert_close(log_prob(ours, ids, support=support), twin.log_prob(ids))
    chances = twin.probs
    torch.testing.assert_close(entropy(ours, support=support), -torch.special.xlogy(chances, chances).sum(-1), atol=1e-5, rtol=1e-5)


def test_forbidden_ids_are_excluded_from_the_distribution():
    raw, allowed = logits(), torch.ones(1, 13, dtype=torch.bool)
    allowed[0, [2, 7]] = False
    ours = warp_logits(raw, allowed, temperature=0.8)
    left = [k for k in range(13) if k not in (2, 7)]
    twin = Categorical(logits=raw[:, left] / 0.8)
    for place, token in enumerate(left):
        ids = torch.full((6,), token)
        torch.testing.assert_close(log_prob(ours, ids), twin.log_prob(torch.full((6,), place)))
    torch.testing.assert_close(entropy(ours), twin.entropy())
    assert not top_k_top_p_mask(ours, top_k=12, top_p=0.99)[:, [2, 7]].any()


def test_ids_tied_with_the_last_top_k_id_are_kept_and_shorter_lists_of_ids_are_padded():
    assert top_k_top_p_mask(torch.tensor([[1.0, 0.0, 1.0, 0.0, -1.0]]), top_k=3).tolist() == [[True, True, True, True, False]]
    ids = mask_to_ids(torch.tensor([[True, False, True, True], [False, True, False, False]]))
    assert ids.tolist() == [[0, 2, 3], [1, -1, -1]]
    raw = logits(2, 4)
    assert gather_logits(raw, ids)[1].tolist() == [raw[1, 1].item(), -torch.inf, -torch.inf]


def test_sampled_ids_have_the_frequencies_of_the_distribution():
    raw = logits(1, 9, seed=3, spread=1.0)
    count = 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # evenly spaced, not random, so a small tolerance is enough
    ids = sample_tokens(raw.expand(count, -1), uniform)
    found = torch.bincount(ids, minlength=9) / count
    torch.testing.assert_close(found, raw[0].softmax(-1), atol=2 / count, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53, 0.5])
def test_ids_with_probability_0_are_never_sampled(uniform):
    raw = logits(4, 50_000, spread=0.01)
    raw[:, ::2] = -torch.inf
    raw[:, -10_000:] = -torch.inf
    ids = sample_tokens(raw, torch.full((4,), uniform, dtype=torch.float64))
    assert (raw.gather(-1, ids[:, None]) > -torch.inf).all()


@pytest.mark.parametrize("support", [None, [[0, 3, 4, -1], [1, 2, 3, 4]]])
def test_gradients_of_log_prob_and_entropy_match_finite_differences(support):
    raw = logits(2, 6, spread=1.0).double().requires_grad_()
    support = None if support is None else torch.tensor(support, dtype=torch.int32)
    ids = torch.tensor([3, 4])
    allowed = torch.tensor([[True] * 5 + [False]])

    def measured(x):
        # ``warp_logits`` computes in fp32, which is too inaccurate for finite differences; its own gradient is 1 / temperature.
        x = x.masked_fill(~allowed, -torch.inf)
        return log_prob(x, ids, support=support), entropy(x, support=support)

    assert torch.autograd.gradcheck(measured, raw)
    gradient = torch.autograd.grad(sum(part.sum() for part in measured(raw)), raw)[0]
    assert gradient.isfinite().all()
    assert (gradient[:, 5] == 0).all()


def test_approx_kl_is_the_kl_of_close_policies():
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.05, 1.0)
    x = torch.randn(400_000, 1, generator=torch.Generator().manual_seed(1))
    estimate = approx_kl(new.log_prob(x) - old.log_prob(x)).mean()
    torch.testing.assert_close(estimate, torch.distributions.kl_divergence(old, new), rtol=0.02, atol=0)
