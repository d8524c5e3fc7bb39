"""A value head in the training loop: it converges to a closed form, the policy improves with it, and several ranks and the
preflight do not change the result."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from PIL.Image import new
from safetensors.torch import load_file
from torch import nn

import tiny_loop
import tiny_policies as tiny
from retouch.core.random import generator
from retouch.distributed.optimizer import HeadStepper, NonFiniteGradient, ReplicatedStepper
from retouch.inference.exporting import export_target
from retouch.objectives.advantages import GAEAdvantage
from retouch.objectives.base import ValueHead
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.value_heads import LatentValues, channels_of, summary
from retouch.recipe.document import apply
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.metrics import Clock
from retouch.run.preflight import preflight
from retouch.run.session import run as run_session
from retouch.run.step import Run, train
from retouch.types import Evaluation, Kind, Slice, Trajectory
from tiny_recipes import SMALL

REWARD = torch.tensor([[0.1, 0.5], [0.9, 0.2]])
"""The reward of a chain of two choices; the row is the first choice."""
CREDIT = GAEAdvantage()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chain(Trajectory):
    """``outputs``: (b, 2) choices."""

    def take(self, rows):
        return replace(self, **{name: getattr(self, name)[rows] for name in NAMES})

    @classmethod
    def concat(cls, parts):
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in NAMES})


NAMES = ("log_probs", "mask", "kind", "outputs", "values")


class Chooser:
    """Logits for each of three states (the start, and after either first choice), and a head that has a value for each."""

    def __init__(self):
        self.module = nn.Module()
        self.module.table = nn.Parameter(torch.zeros(3, 2))
        self.head = nn.Embedding.from_pretrained(torch.zeros(3, 1), freeze=False)

    def _states(self, choices):
        return torch.stack([torch.zeros_like(choices[:, 0]), 1 + choices[:, 0]], dim=1)

    def _log_probs(self, choices):
        return self.module.table[self._states(choices)].log_softmax(-1).gather(-1, choices[..., None]).squeeze(-1)

    @torch.no_grad()
    def rollout(self, batch):
        choices = torch.zeros(len(batch), 2, dtype=torch.long)
        chances = self.module.table.softmax(-1)[:, 1]
        for row, (group, slot) in enumerate(zip(batch.group, batch.slot, strict=True)):
            drawn = torch.rand(2, generator=generator(batch.seed, "choice", batch.step, batch.group_ids[group], slot))
            choices[row, 0] = drawn[0] < chances[0]
            choices[row, 1] = drawn[1] < chances[1 + choices[row, 0]]
        return Chain(
            log_probs=self._log_probs(choices),
            mask=torch.ones_like(choices, dtype=torch.bool),
            kind=torch.full_like(choices, Kind.TEXT_TOKEN),
            outputs=choices,
            values=self.head(self._states(choices)).squeeze(-1),
        )

    sample = rollout

    def microbatches(self, trajectory) -> Iterator[Slice]:
        yield Slice(slice(0, len(trajectory)), slice(0, 2))

    def evaluate(self, trajectory, part, needs):
        choices = trajectory.outputs[part.rows]
        log_probs = self._log_probs(choices)
        values = self.head(self._states(choices)).squeeze(-1) if needs.values else None
        return Evaluation(log_probs, log_probs - trajectory.log_probs[part.rows], values=values)


def reward_images(tasks, trajectory):
    """Images whose share of red is the reward of the choices."""
    earned = [REWARD[first, second].item() for first, second in trajectory.outputs.tolist()]
    return [new("RGB", (1, 1), (round(250 * share), 250 - round(250 * share), 0)) for share in earned]


def chain_run(policy, learning_rate, *, steps, credit=CREDIT):
    """64 chains per step, each with its own task."""
    plain = ReplicatedStepper(policy.module, tiny_loop.ALONE, max_grad_norm=None)
    stepper = HeadStepper(plain, ReplicatedStepper(policy.head, tiny_loop.ALONE), learning_rate=0.05)
    run = Run(
        **{"policy": policy, "renderer": reward_images, "judge": tiny_loop.RedJudge(), "stepper": stepper, "clock": Clock()},
        **{"ranks": tiny_loop.ALONE, "chunk": 64, "max_missing": 0.5, "average": lambda taken: None},
    )
    objective = PolicyGradient(clip_low=0.2, clip_high=0.2).build(value_head=ValueHead(clip=None))
    options = {"learning_rate": lambda step: learning_rate, "advantage": credit}
    phase = tiny_loop.phase(objective, count=64, group_size=1, steps=range(steps), epochs=2, **options)
    return [metrics for _, _, metrics in train(run, phase, start=0)]


def test_value_head_converges_to_the_expected_return():
    """With a uniform policy: the mean of all rewards at the start, and the mean of a row of rewards after the first choice."""
    policy = Chooser()
    metrics = chain_run(policy, 0.0, steps=60)
    wanted = 2 * torch.stack([REWARD.mean(), *REWARD.mean(1)]) - 1
    torch.testing.assert_close(policy.head.weight[:, 0].detach(), wanted, atol=0.1, rtol=0)
    # Only the second of the two states tells something about the reward: the head explains the variance of the row means of REWARD.
    wanted = REWARD.mean(1).var(correction=0) / REWARD.var(correction=0) / 2
    late = torch.tensor([one["value/explained_variance"] for one in metrics[-20:]]).mean()
    assert late.item() == pytest.approx(wanted.item(), abs=0.06)
    assert metrics[0]["value/explained_variance"] == pytest.approx(0, abs=1e-6)
    # The remaining loss is half the variance of all rewards at the first choice, and of a row of rewards at the second.
    left = 4 * torch.stack([REWARD.var(correction=0), REWARD.var(1, correction=0).mean()]).mean() / 2
    assert torch.tensor([one["value/loss"] for one in metrics[-20:]]).mean().item() == pytest.approx(left.item(), abs=0.02)


@pytest.mark.parametrize(
    ("gamma", "lam"), [(0.95, 0.9), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1.0, 1.0), (1.0, 0.0)))]
)
def test_policy_trained_with_a_value_head_finds_the_best_actions(gamma, lam):
    """With lam 0, the reward reaches the first choice only through the value head."""
    policy = Chooser()
    metrics = chain_run(policy, 0.1, steps=50, credit=CREDIT.model_copy(update={"gamma": gamma, "lam": lam}))
    chances = policy.module.table.softmax(-1).detach()
    assert chances[0, 1] > 0.95
    assert chances[2, 0] > 0.95
    assert metrics[-1]["reward/mean"] > 0.85


def denoising_policy():
    policy = tiny.policy(mode="window", microbatch=2)
    conditioning = policy.model.encode(tiny.tasks(4))
    x = policy.model.initial_noise(conditioning, [generator("state")] * 4)
    policy.head = LatentValues(channels_of(x), summary(conditioning), width=8, seed=0)
    return policy


def denoising_run(policy, ranks=tiny_loop.ALONE, **options):
    run = tiny_loop.run(policy, ranks=ranks, chunk=100, **options)
    head = ReplicatedStepper(policy.head, ranks, max_grad_norm=None)
    return replace(run, stepper=HeadStepper(run.stepper, head, learning_rate=0.01))


def denoising_phase(ranks=tiny_loop.ALONE, **options):
    objective = tiny_loop.GRPO.build(value_head=ValueHead(clip=0.2))
    return tiny_loop.phase(objective, advantage=CREDIT, count=3, group_size=2, ranks=ranks, **options)


def after_two_steps(ranks, policy):
    run = denoising_run(policy, ranks, judge=tiny_loop.RandomJudge([(1, 1)]))
    metrics = [metrics for _, _, metrics in train(run, denoising_phase(ranks, steps=range(2)), start=0)]
    return metrics, {name: parameter.detach().clone() for name, parameter in policy.head.named_parameters()}, tiny.trained(policy)


@pytest.mark.parametrize("world", [2])
def test_training_with_a_value_head_on_several_ranks_matches_one_rank(world):
    """One score is missing, so that ranks have unequal numbers of valid rows; the second step uses the head after one update."""
    wanted, head, weights = after_two_steps(tiny_loop.ALONE, denoising_policy())
    policies = [denoising_policy() for _ in range(world)]
    for metrics, same_head, same in tiny_loop.run_on_threads(world, lambda ranks: after_two_steps(ranks, policies[ranks.rank])):
        for one, other in zip(metrics, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
        for name, parameter in head.items():
            torch.testing.assert_close(same_head[name], parameter, atol=1e-4, rtol=0)
        for name, parameter in weights.items():
            torch.testing.assert_close(same[name], parameter, atol=1e-4, rtol=0)
    assert head["network.outer.weight"].abs().max() > 0.01


def test_preflight_restores_the_value_head_and_its_optimizer():
    policy = denoising_policy()
    run, phase = denoising_run(policy), denoising_phase()
    list(train(run, replace(phase, steps=range(1)), start=0))
    before = {name: tensor.clone() for name, tensor in run.stepper.state().items()}
    checks = preflight(run, phase, step=1, rows=4)
    assert all(check.ok for check in checks), checks
    assert {"ratio_before", "ratio_after", "kl_gradient"} <= {check.name for check in checks}
    after = run.stepper.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def pair(loss_scale=1):
    policy, head = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)
    for module in (policy, head):
        nn.init.constant_(module.weight, 0.5)
    steppers = [ReplicatedStepper(module, tiny_loop.ALONE, max_grad_norm=1e-3) for module in (policy, head)]
    return HeadStepper(*steppers, learning_rate=0.01, loss_scale=loss_scale), policy, head


def test_policy_and_value_head_have_separate_learning_rates_and_gradient_clipping():
    made, policy, head = pair()
    made.backward(policy(torch.ones(1, 2)).sum() * float("nan") + head(torch.ones(1, 3)).sum())
    with pytest.raises(NonFiniteGradient, match="the loss is not finite"):
        made.step(0.1)
    assert torch.equal(head.weight, torch.full((1, 3), 0.5))
    assert torch.equal(policy.weight, torch.full((1, 2), 0.5))
    made, policy, head = pair()
    made.backward(policy(torch.ones(1, 2)).sum() + 100 * head(torch.ones(1, 3)).sum())
    assert made.step(0.1) == pytest.approx(2**0.5)
    # AdamW's first step is as long as the learning rate, whatever the gradient.
    torch.testing.assert_close(policy.weight.detach(), torch.full((1, 2), 0.4), atol=1e-3, rtol=0)
    torch.testing.assert_close(head.weight.detach(), torch.full((1, 3), 0.49), atol=1e-4, rtol=0)


def test_loss_scale_is_removed_from_the_value_head_gradient():
    moments = []
    for times in (1, 4):
        made, _, head = pair(loss_scale=times)
        made.second.max_grad_norm = 100.0
        made.backward(times * head(torch.ones(1, 3)).sum())
        made.step(0.1)
        moments.append(made.state()["value_head/weight/exp_avg"])
    torch.testing.assert_close(*moments)


def test_head_stepper_state_restores_the_head_and_the_next_step_bitwise():
    one, *modules = pair()
    other, *others = pair()

    def step(made, policy, head):
        made.backward(policy(torch.ones(1, 2)).square().sum() + head(torch.ones(1, 3)).square().sum())
        made.step(0.1)

    step(one, *modules)
    others[0].load_state_dict(modules[0].state_dict())  # the policy's weights are saved elsewhere
    other.load({name: tensor.clone() for name, tensor in one.state().items()})
    for made, parts in ((one, modules), (other, others)):
        step(made, *parts)
    assert torch.equal(modules[0].weight, others[0].weight)
    assert torch.equal(modules[1].weight, others[1].weight)


def test_run_saves_its_value_head_in_checkpoints_and_does_not_export_it(tmp_path):
    changes = ["steps=1", f"out={tmp_path}", "trackers=[]", "group_size=1", "tasks_per_step=4", "policy.ema=null"]
    changes += ["eval.every=0", "eval.tasks=1"]
    recipe = parse({**apply(SMALL, changes), "advantage": {"kind": "gae"}})
    assert run_session(recipe, fresh=False) == 0
    folder = RunFolder(tmp_path / "small")
    state = checkpoint.load(folder.checkpoints / "step-000001")
    saved = {name for group in state.tensors.values() for name in group if "value_head" in name}
    assert {"value_head/weights/network.outer.weight", "value_head/network.outer.weight/exp_avg"} <= saved
    assert not any("value_head" in name for name in state.tensors["weights"])
    assert state.tensors["optimizer"]["value_head/weights/network.outer.weight"].abs().max() > 0
    (metrics,) = folder.read_metrics()
    assert metrics["value/loss"] > 0
    (times,) = map(json.loads, folder.timings.read_text().splitlines())
    assert times["memory/peak_gb"] > 0
    assert not any(name.startswith("memory/") for name in metrics)
    exported = export_target(str(folder.root), to=tmp_path / "exported")
    names = {name for file in exported if file.suffix == ".safetensors" for name in load_file(file)}
    assert names
    assert not any("network" in name or "value" in name.split(".") for name in names)
