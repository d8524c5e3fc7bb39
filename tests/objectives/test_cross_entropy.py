"""Supervised learning of a writer: rows of similar length share a forward pass, and the gradient does not change."""

import dataclasses

import pytest
import torch

import tiny_emu3
import tiny_models
import tiny_policies
import tiny_writing
from retouch.core.surrogates import loss_weights
from retouch.models.emu3 import DRAW, THINK
from retouch.objectives.imitation import CrossEntropy
from retouch.types import Minibatch, Needs

THOUGHTS = (40, 2, 33, 5, 0, 38, 1, 36)  # letters of each row's thought
MICROBATCH = 2


class Unordered:
    """The policy without ordering by length."""

    def __init__(self, policy):
        self._policy = policy

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def order_by_length(self, trajectory):
        return torch.arange(len(trajectory))


def tasks():
    picture = tiny_models.image(0, 16, 24)
    plain = tiny_models.task("plain", "make it red", picture)
    return tuple(
        dataclasses.replace(plain, id=str(row), target=tiny_models.image(row, 16, 24), meta={"thought": "a" * letters})
        for row, letters in enumerate(THOUGHTS)
    )


def pairs(lengths):
    return [sorted(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)]


def demonstrated(prefill, *, share=True, group_size=1):
    editor = tiny_emu3.editor(prefill=prefill, train="full")
    policy = tiny_writing.policy(
        writer=editor, train="full", copies=(), sampling={"max_new_tokens": 220}, microbatch=MICROBATCH, share=share
    )
    batch = tiny_writing.batch(tasks(), group_size=group_size)
    trajectory = policy.demonstrate(batch)
    valid = torch.ones(len(batch), dtype=torch.bool)
    valid[2] = False
    weights = loss_weights(trajectory.mask, valid, normalise="sequence")
    return policy, Minibatch(batch, trajectory, torch.ones_like(weights), weights, 0)


def padded(policy, minibatch):
    """The gradient, and the number of padding tokens in the inputs of the decoder."""
    counts = []

    def count(module, args, kwargs):
        width = kwargs["inputs_embeds"].shape[1]
        counts.append(int((kwargs["attention_mask"][:, -width:] == 0).sum()))

    hook = policy.model.decoder(policy.module).register_forward_pre_hook(count, with_kwargs=True)
    found, _ = tiny_policies.gradient(policy, CrossEntropy(), minibatch)
    hook.remove()
    return found, sum(counts)


@pytest.mark.parametrize("share", [True, False])
def test_ordering_rows_by_length_reduces_padding_and_keeps_the_gradient(share):
    policy, minibatch = demonstrated(THINK, share=share)
    ordered, few = padded(policy, minibatch)
    as_they_come, many = padded(Unordered(policy), minibatch)
    longest = max(float(gradient.abs().max()) for gradient in as_they_come.values())
    for name, gradient in ordered.items():
        assert (gradient - as_they_come[name]).abs().max() <= 1e-5 * max(1.0, longest), name
    # Padding of the shorter row in pairs of the sorted and of the unsorted rows. The last token of a row is not an input.
    assert few == sum(b - a - 1 for a, b in pairs(sorted(THOUGHTS)))
    assert many == sum(b - a - 1 for a, b in pairs(THOUGHTS))
    assert few * 5 < many
    policy.microbatch = len(THOUGHTS)
    assert policy.order_by_length(minibatch.trajectory).tolist() == list(range(len(THOUGHTS)))


def test_loss_is_the_weighted_sum_of_negative_log_probabilities():
    policy, minibatch = demonstrated(THINK)
    _, losses = tiny_policies.gradient(policy, CrossEntropy(), minibatch)
    policy.microbatch, wanted = len(THOUGHTS), 0.0
    with torch.no_grad():
        for part in policy.microbatches(minibatch.trajectory):
            log_probs = policy.evaluate(minibatch.trajectory, part, Needs()).log_probs
            for weights, row in zip(minibatch.weights[part.rows, part.actions], log_probs, strict=True):
                wanted += sum(-weight * log_prob for weight, log_prob in zip(weights.tolist(), row.tolist(), strict=True) if weight)
    assert wanted > 0
    assert sum(loss.value.item() for loss in losses) == pytest.approx(wanted, rel=1e-4)


def test_ordering_by_length_keeps_rows_of_one_task_together():
    policy, minibatch = demonstrated(THINK, group_size=2)
    order = policy.order_by_length(minibatch.trajectory)
    groups = minibatch.trajectory.group[order].tolist()
    assert groups[::2] == groups[1::2]
    assert [THOUGHTS[group] for group in groups[::2]] == sorted(THOUGHTS)
    taken = minibatch.trajectory.take(order)
    assert [len(written.ids) + 1 for written in taken.outputs] == taken.lengths.tolist()


def test_rows_are_ordered_by_prompt_length_if_completions_have_equal_lengths():
    policy, minibatch = demonstrated(DRAW)
    told = [dataclasses.replace(task, instruction="x" * letters) for task, letters in zip(tasks(), THOUGHTS, strict=True)]
    batch = tiny_writing.batch(tuple(told), group_size=1)
    trajectory = policy.demonstrate(batch)
    assert len(set(trajectory.lengths.tolist())) == 1
    assert [THOUGHTS[row] for row in policy.order_by_length(trajectory).tolist()] == sorted(THOUGHTS)
    few, many = (padded(each, dataclasses.replace(minibatch, trajectory=trajectory))[1] for each in (policy, Unordered(policy)))
    assert few * 5 < many
