"""The training loop with a tiny policy, assembled as for a recipe, and the gradient of a step."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

import tiny_policies as tiny
from retouch.core.random import generator
from retouch.data.tasks import assign, global_rows
from retouch.distributed.optimizer import ReplicatedStepper
from retouch.distributed.ranks import Ranks
from retouch.objectives.advantages import GroupAdvantage
from retouch.objectives.policy_gradient import Kl, PolicyGradient
from retouch.policies.engine import EngineFault
from retouch.renderers.base import LatentRenderer
from retouch.rewards.judging import RewardScorer
from retouch.rewards.pixels import ShareReward
from retouch.run.metrics import Clock
from retouch.run.step import Phase, Run

ALONE = Ranks()
GRPO = PolicyGradient(clip_low=1e-4, clip_high=1e-4, kl=Kl(kind="closed", weight=0.01))


class RedJudge:
    """Scores how red an image is; the scores of the rows (group, slot) in ``missing`` are missing."""

    def __init__(self, missing=()):
        self.judge = RewardScorer(ShareReward(), {"share": 1.0})
        self.missing = set(missing)
        self.sample_counts = []

    def __call__(self, batch, samples):
        self.sample_counts.append(len(samples))
        judged = self.judge(samples)
        lost = torch.tensor([(batch.group_ids[g], slot) in self.missing for g, slot in zip(batch.group, batch.slot, strict=True)])
        rewards = self.rewards(batch, judged).masked_fill(lost, torch.nan)
        future = Future()
        future.set_result(replace(judged, scores={"share": rewards}, rewards=rewards))
        return future

    def rewards(self, batch, judged):
        return judged.rewards


class RandomJudge(RedJudge):
    """A random reward for each task and slot, independent of the image, so that rounding errors of pixels do not change it."""

    def rewards(self, batch, judged):
        rows = [(batch.group_ids[g], slot) for g, slot in zip(batch.group, batch.slot, strict=True)]
        return torch.stack([torch.rand((), generator=generator("reward", *row)) for row in rows]).to(judged.rewards)


def run(policy, *, judge=None, ranks=ALONE, chunk=4, max_missing=0.5, average=lambda taken: None):
    stepper = ReplicatedStepper(policy.model.module, ranks, max_grad_norm=None)
    policy.module = stepper.module
    return Run(
        policy=policy,
        renderer=LatentRenderer(policy.model),
        judge=judge or RedJudge(),
        stepper=stepper,
        ranks=ranks,
        chunk=chunk,
        max_missing=max_missing,
        average=average,
        clock=Clock(),
    )


def phase(objective=GRPO, *, count=2, group_size=3, ranks=ALONE, minibatches=1, **options):
    """Make a phase with ``count`` tasks per step in groups of ``group_size``, split into minibatches and ranks as in a run."""
    rows = count * group_size

    def batch(step):
        return assign(
            seed=3,
            step=step,
            tasks=tiny.tasks(count),
            group_size=group_size,
            minibatches=minibatches,
            rank=ranks.rank,
            world=ranks.world,
        )

    shares = [global_rows(rows=rows, minibatches=minibatches, rank=rank, world=ranks.world) for rank in range(ranks.world)]
    options = {
        "advantage": GroupAdvantage(),
        "batch": batch,
        "order": torch.tensor([row for share in shares for row in share]),
        "group": torch.arange(rows) // group_size,
        "steps": range(4),
        "epochs": 1,
        "learning_rate": lambda step: 1e-3,
        **options,
    }
    return Phase(name="rl", objective=objective, minibatches=minibatches, **options)


def gradient(run):
    """Return the gradient of the first optimizer step, reduced over all ranks: 10 times AdamW's first moment."""
    state = run.stepper.state()
    return {name: 10 * tensor for key, tensor in state.items() for name, end in [key.rsplit("/", 1)] if end == "exp_avg"}


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    table: list = field(default_factory=list)

    def gather(self, values):
        return torch.cat(self._exchange(values))

    def sum(self, values):
        return torch.stack(self._exchange(values)).sum(0)

    def max(self, values):
        return torch.stack(self._exchange(values)).amax(0)

    def _exchange(self, values):
        self.table[self.rank] = values.detach().clone()
        self.barrier.wait(timeout=300)
        told = list(self.table)
        self.barrier.wait(timeout=300)
        return told


def thread_ranks(world):
    barrier, table = threading.Barrier(world), [None] * world
    return [ThreadRanks(rank=rank, world=world, barrier=barrier, table=table) for rank in range(world)]


def run_on_threads(world, act):
    """Run ``act(ranks)`` on ``world`` threads and return the results in the order of ranks; an exception is a result too.

    ``world``: their number, or ranks that ``thread_ranks`` made, which can be used again if no exception was raised.
    """
    members = thread_ranks(world) if isinstance(world, int) else world
    results = [None] * len(members)

    def one(ranks):
        try:
            results[ranks.rank] = act(ranks)
        except BaseException as error:
            results[ranks.rank] = error
            ranks.barrier.abort()
            raise

    threads = [threading.Thread(target=one, args=(ranks,)) for ranks in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def engine_fault(policy, batch):
    """Return the text of the engine's fault that a rollout raises, or None."""
    try:
        policy.rollout(batch)
    except EngineFault as fault:
        return str(fault)
    return None
