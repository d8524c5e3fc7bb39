"""The sampled distribution: against torch.distributions, transformers' warpers, and counting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from retouch.core.tokens import entropy, gather_logits, log_prob, mask_to_ids, sample_tokens, top_k_top_p_mask, warp_logits


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


def test_ids_tied_with_the_last_top_k_id_are_kept():
    assert top_k_top_p_mask(torch.tensor([[1.0, 0.0, 1.0, 0.0, -1.0]]), top_k=3).tolist() == [[True, True, True, True, False]]


def test_kept_ids_are_padded_with_minus_1_and_their_logits_with_minus_inf():
    stays = torch.tensor([[True, False, True, True], [False, True, False, False]])
    ids = mask_to_ids(stays)
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
