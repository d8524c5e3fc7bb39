"""The training loop of a language model: the reward increases, and microbatches, chunks and ranks change nothing."""

from dataclasses import replace

import torch
from PIL.Image import new

import tiny_loop
import tiny_policies
import tiny_writers
import tiny_writing
from retouch.data.tasks import assign
from retouch.distributed.optimizer import ReplicatedStepper
from retouch.objectives.policy_gradient import Kl, PolicyGradient, TokenCycle
from retouch.policies.decoding import CachedDecoding
from retouch.run.metrics import Clock
from retouch.run.step import Run, accumulate, collect, make_minibatch

GRPO = PolicyGradient(clip_low=0.2, clip_high=0.2, kl=Kl(kind="k3", weight=0.01))
TASKS = tiny_writers.tasks(2)


def redness(tasks, trajectory):
    """An image per completion, whose red value is the fraction of even ids; None for a truncated completion."""
    return [
        None
        if written.truncated
        else new("RGB", (1, 1), (int(255 * sum(k % 2 == 0 for k in written.ids) / max(len(written.ids), 1)), 255, 0))
        for written in trajectory.outputs
    ]


def run(policy, *, ranks=tiny_loop.ALONE, chunk):
    stepper = ReplicatedStepper(policy.module, ranks, max_grad_norm=None)
    return Run(
        policy=policy,
        renderer=redness,
        judge=tiny_loop.RedJudge(),
        stepper=stepper,
        ranks=ranks,
        chunk=chunk,
        max_missing=0.5,
        average=lambda taken: None,
        clock=Clock(),
    )


def phase(*, ranks=tiny_loop.ALONE, group_size=4, minibatches=1, **options):
    made = tiny_loop.phase(GRPO, group_size=group_size, ranks=ranks, minibatches=minibatches, **options)

    def batch(step):
        shares = {"minibatches": minibatches, "rank": ranks.rank, "world": ranks.world}
        return assign(seed=3, step=step, tasks=TASKS, group_size=group_size, **shares)

    return replace(made, batch=batch)


EARL = PolicyGradient(surrogate="reinforce", kl=Kl(kind="k3", weight=3e-4))


class Uneven:
    """Ends the completions of the first group after one token; all others have seven tokens."""

    exact = True

    def __init__(self, model):
        self.decoder = CachedDecoding(model)
        self.model = model

    def __call__(self, batch, prompts, sampling):
        made = self.decoder(batch, prompts, sampling)
        first = torch.tensor(batch.group_ids)[torch.tensor(batch.group)] == 0
        ids, lengths = made.ids.clone(), torch.full_like(made.lengths, made.ids.shape[1])
        ids[first, 0], ids[first, 1:], lengths[first] = self.model.stop[0], self.model.pad, 1
        ids[~first] = torch.where(torch.isin(ids, torch.tensor([*self.model.stop, self.model.pad])), 65, ids)[~first]
        return replace(made, ids=ids, lengths=lengths)


def uneven_gradient(policy, ranks=tiny_loop.ALONE, *, alone=False):
    """``alone``: each rank divides by the number of its own tokens, as the published code does."""
    policy.engine = Uneven(policy.model)
    made = run(policy, ranks=ranks, chunk=4)
    learning = replace(phase(ranks=ranks, steps=range(1)), objective=EARL)
    collected = collect(made, learning, 0)
    paid = torch.tensor([[float(slot) - 1.5] for slot in collected.batch.slot]).expand_as(collected.advantages)
    dividing = replace(made, ranks=tiny_loop.ALONE) if alone else made
    accumulate(made, EARL, make_minibatch(dividing, learning, replace(collected, advantages=paid), slice(0, len(paid)), 0))
    made.stepper.step(1e-3)
    return tiny_loop.gradient(made), collected.trajectory.mask.sum().item()


def test_two_ranks_with_unequal_lengths_get_the_gradient_of_one_rank():
    wanted, tokens = uneven_gradient(tiny_writing.policy())
    policies = [tiny_writing.policy() for _ in range(2)]
    shared = tiny_loop.run_on_threads(2, lambda ranks: uneven_gradient(policies[ranks.rank], ranks))
    assert [written for _, written in shared] == [4, 28]
    assert tokens == 32
    assert all(tiny_policies.distance(found, wanted) < 1e-5 for found, _ in shared)
    policies = [tiny_writing.policy() for _ in range(2)]
    biased = tiny_loop.run_on_threads(2, lambda ranks: uneven_gradient(policies[ranks.rank], ranks, alone=True))
    assert all(tiny_policies.distance(found, wanted) > 0.1 for found, _ in biased)


def test_only_tokens_of_the_selected_kind_get_loss_weights():
    writer = tiny_writers.writer("qwen2.5-vl")
    writer.grammar = tiny_writing.ForcedGrammar(writer)
    policy = tiny_writing.policy(writer=writer)
    made = run(policy, chunk=4)
    turns = PolicyGradient(tokens=TokenCycle(text_steps=2, vision_steps=1))
    assert [turns.trained_kinds(step) for step in range(7)] == [[0], [0], [1], [0], [0], [1], [0]]
    everything, weighed = phase(steps=range(1)), {}
    made = replace(made, renderer=lambda tasks, trajectory: [new("RGB", (1, 1), (9 * row, 0, 0)) for row in range(len(tasks))])
    for tokens in ("all", "text", "vision"):
        learning = replace(everything, objective=PolicyGradient(normalise="token", tokens=tokens))
        collected = collect(made, learning, 0)
        weighed[tokens] = make_minibatch(made, learning, collected, slice(0, len(collected.batch)), 0).weights
    mask, kind = collected.trajectory.mask, collected.trajectory.kind
    for tokens, right in (("all", mask), ("text", mask & (kind == 0)), ("vision", mask & (kind == 1))):
        assert right.any()
        assert torch.equal(weighed[tokens], right / right.sum()), tokens


def test_microbatches_do_not_depend_on_completion_lengths():
    policy = tiny_writing.policy(microbatch=2)
    long, short = (policy.rollout(tiny_writing.batch(seed=seed)) for seed in (3, 4))
    assert not torch.equal(long.lengths, short.lengths)
    assert list(policy.microbatches(long)) == list(policy.microbatches(short))
