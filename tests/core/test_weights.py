"""Loss weights: what each normalisation computes, and that the split over ranks changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from retouch.core.surrogates import loss_weights

MODES = [("token", None), ("sequence", None), ("dr_grpo", 16)]
REFUSED = (ValueError, TypeCheckError)  # the second where annotations are checked at run time
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
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    valid = torch.tensor([True, True, False])
    loss = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 99.0, 99.0, 99.0], [99.0, 99.0, 99.0, 99.0]])
    expected = {"token": 20 / 5, "sequence": (10 / 4 + 10 / 1) / 2, "dr_grpo": 20 / (2 * 16)}
    for normalise, max_length in MODES:
        weights = loss_weights(mask, valid, normalise=normalise, max_length=max_length)
        assert float((weights * loss).sum()) == pytest.approx(expected[normalise])


def test_a_valid_row_without_actions_does_not_dilute_the_sequence_mean():
    mask = torch.tensor([[True, True], [False, False]])
    weights = loss_weights(mask, torch.tensor([True, True]), normalise="sequence")
    assert weights.tolist() == [[0.5, 0.5], [0, 0]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"normalise": "dr_grpo"}, "needs max_length"),
        ({"normalise": "token", "max_length": 3}, "only it takes one"),
        ({"normalise": "dr_grpo", "max_length": 0}, "at least 1"),
        ({"normalise": "mean"}, r"'token', 'sequence' or 'dr_grpo'|Type-check"),
    ],
)
def test_invalid_normalisation_options_raise(options, told):
    with pytest.raises(REFUSED, match=told):
        loss_weights(torch.ones(2, 3, dtype=torch.bool), torch.ones(2, dtype=torch.bool), **options)
