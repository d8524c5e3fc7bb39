"""`make bench` compares the same computation in Retouch and TRL: a batch of TRL gives the same gradient in both."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retouch.core.advantages import group_relative
from retouch.core.surrogates import loss_weights
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.engine import Generation
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.types import Batch, Minibatch, Slice

MEASUREMENTS = Path(__file__).parents[2] / "measurements" / "speed"


@pytest.fixture(scope="module")
def twins():
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed (extra `trl`)")
    sys.path.insert(0, str(MEASUREMENTS))
    try:
        import twin_writers
    finally:
        sys.path.remove(str(MEASUREMENTS))
    return twin_writers


def trl_batch_and_gradient(twins, pair, setting, folder):
    """A batch as TRL generated and scored it, and the gradient of its loss."""
    trainer, kept = twins.trainer(pair, setting, seed=0, folder=str(folder))
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    batch = trainer._generate_and_score_completions(rows)
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch).backward()
    module = pair.theirs.module
    return batch, kept.calls[0], {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}


def ours(twins, pair, batch):
    """The library's gradient on the same ids and advantages."""
    writer, ids, mask = pair.ours, batch["completion_ids"], batch["completion_mask"].bool()
    writer.grammar.vocabularies = torch.ones_like(writer.grammar.vocabularies)  # TRL evaluates on the whole vocabulary
    sampling = TokenRollout(max_new_tokens=ids.shape[1])
    policy = AutoregressivePolicy(writer, sampling=sampling, microbatch=8, copies=WeightCopies(writer.module))
    tasks = tuple(pair.tasks[: twins.TASKS_PER_STEP])
    rows = range(twins.ROWS)
    asked = Batch(
        seed=0, step=0, tasks=tasks, group_ids=tuple(range(len(tasks))), group=tuple(row // twins.GROUP_SIZE for row in rows),
        slot=tuple(row % twins.GROUP_SIZE for row in rows),
    )  # fmt: skip
    written = Generation(ids=ids, lengths=mask.sum(-1), log_probs=torch.zeros(ids.shape))
    trajectory = policy._trajectory(asked, writer.encode(tasks), written)
    everything = Slice(slice(0, twins.ROWS), slice(0, ids.shape[1]))
    with torch.no_grad():
        trajectory = replace(trajectory, log_probs=policy._log_probs(writer.module, trajectory, everything))
    assert torch.equal(trajectory.mask, mask)
    weights = loss_weights(mask, torch.ones(len(ids), dtype=torch.bool), normalise="token")
    minibatch = Minibatch(asked, trajectory, batch["advantages"][:, None].expand_as(weights), weights)
    for loss in PolicyGradient(clip_low=0.2, clip_high=0.2).losses(policy, minibatch):
        loss.value.backward()
    return {name: weight.grad for name, weight in writer.module.named_parameters() if weight.requires_grad}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_the_gradient_on_a_batch_of_trl_equals_the_gradient_of_trl(twins, tmp_path):
    setting = twins.Setting("test", side=24, longest=12)
    pair = twins.twins(setting, seed=0, steps=1)
    batch, rewards, theirs = trl_batch_and_gradient(twins, pair, setting, tmp_path)
    advantages = group_relative(torch.tensor(rewards), torch.arange(twins.ROWS) // twins.GROUP_SIZE, ddof=1, clip=None)
    assert torch.allclose(advantages, batch["advantages"], atol=1e-5)
    assert advantages.abs().max() > 1
    mine = ours(twins, pair, batch)
    assert mine.keys() == theirs.keys()
    size = math.sqrt(sum(each.square().sum().item() for each in theirs.values()))
    apart = math.sqrt(sum((mine[name] - theirs[name]).square().sum().item() for name in theirs))
    assert size > 0
    assert apart / size < 1e-4
