"""Log-probabilities computed in chunks: equal to those of all logits at once, which are never allocated together."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny_writers
import tiny_writing
from retouch.policies.decoding import scatter, token_log_probs
from retouch.types import Needs, Slice

VOCABULARY = 152_064


class LargestTensor(TorchDispatchMode):
    """The number of elements in the largest block of memory that any operation allocates."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def wide_policy(longest, chunk):
    """A narrow Qwen2.5 with the vocabulary of the published ones."""
    text = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    writer = tiny_writers.writer("qwen2.5", text=text)
    return tiny_writing.policy(writer=writer, sampling={"max_new_tokens": longest}, logits_at_once=chunk)


def largest_of_an_update(rows, longest, chunk):
    policy = wide_policy(longest, chunk)
    batch = tiny_writing.batch(tiny_writers.tasks(1, with_images=False), rows)
    trajectory = policy.rollout(batch)
    whole = Slice(slice(0, rows), slice(0, longest))
    with LargestTensor() as seen:
        evaluation = policy.evaluate(trajectory, whole, Needs(kl="k3", entropy=True))
        (evaluation.log_probs + evaluation.kl + evaluation.entropy).sum().backward()
    return seen.numbers


def test_the_update_allocates_the_logits_of_one_chunk_at_most():
    """With more rows and tokens, the largest block of memory is still the logits of one chunk."""
    assert largest_of_an_update(2, 3, chunk=2) == largest_of_an_update(4, 6, chunk=2) == 2 * VOCABULARY
    assert largest_of_an_update(4, 6, chunk=24) == 24 * VOCABULARY, "the test sees no logits where there are"


@pytest.mark.parametrize("support", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_chunk_size_does_not_change_log_probs_entropy_and_gradients(chunk, support):
    writer = tiny_writers.writer("qwen2.5", train="full")
    random = torch.Generator().manual_seed(1)
    states = torch.randn(8, 32, generator=random).requires_grad_()
    ids = torch.randint(0, 200, (8,), generator=random)
    kept = torch.stack([torch.cat([ids[k : k + 1], torch.arange(200, 205), torch.tensor([-1])]) for k in range(8)]).int()

    def measured(chunk):
        return token_log_probs(
            writer,
            writer.module,
            states,
            ids,
            vocabulary=torch.zeros(8, dtype=torch.long),
            support=kept if support else None,
            temperature=0.8,
            chunk=chunk,
            with_entropy=True,
        )

    head = writer.module.lm_head.weight
    parts, whole = measured(chunk), measured(8)
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b)
        for found, wanted in zip(
            *(torch.autograd.grad(x.square().sum(), (states, head), retain_graph=True) for x in (a, b)), strict=True
        ):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    logits = (states @ head.T / 0.8).masked_fill(~writer.grammar.vocabularies, -torch.inf)
    if support:
        logits = torch.full_like(logits, -torch.inf).scatter(1, kept[:, :-1].long(), logits.gather(1, kept[:, :-1].long()))
    torch.testing.assert_close(whole[0], logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


def test_a_batch_without_sampled_tokens_has_a_gradient_of_0():
    writer = tiny_writers.writer("qwen2.5")
    states = torch.randn(3, 4, 32).requires_grad_()
    choice = torch.zeros(3, 4, dtype=torch.bool)
    nothing = torch.zeros(0, dtype=torch.long)
    given = {"vocabulary": nothing, "support": None, "temperature": 1.0, "chunk": 2}
    found, none = token_log_probs(writer, writer.module, states[choice], nothing, **given)
    assert none is None
    column = scatter(found, choice)
    assert (column == 0).all()
    (gradient,) = torch.autograd.grad(column.sum(), states)
    assert (gradient == 0).all()
