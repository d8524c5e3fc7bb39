"""The algorithms that the league compares: for each, its changes of a world's recipe and the settings that are searched.

To add an algorithm, add a row to `DENOISING` or `TOKENS`; a new kind of objective also needs a line in `budget.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class Knob:
    """A setting that is searched. All ``keys`` of the recipe get the same value.

    The first trial uses ``default``. The other trials draw a value from ``choices``, or between ``low`` and ``high``: uniformly in
    the logarithm if ``log`` is True, else uniformly.
    """

    name: str
    keys: tuple[str, ...]
    default: float
    low: float = 0.0
    high: float = 0.0
    log: bool = True
    choices: tuple[float, ...] = ()

    def draw(self, trial: "optuna.Trial") -> float:
        """Draw the value of this trial, rounded to three significant digits, so that it is easy to copy."""
        if self.choices:
            return trial.suggest_categorical(self.name, self.choices)
        return float(f"{trial.suggest_float(self.name, self.low, self.high, log=self.log):.3g}")


@dataclass(frozen=True)
class Contestant:
    """An algorithm: ``changes`` of the keys of the world's recipe, and the ``knobs`` that are searched. ``source``: its paper.

    ``tasks_for_groups``: every sample has a different task, because the baseline needs no group; the number of samples per step
    stays the same.
    """

    name: str
    source: str
    changes: Mapping[str, Any]
    knobs: tuple[Knob, ...]
    tasks_for_groups: bool = False


LEARNING_RATE = Knob("learning rate", ("learning_rate",), 3e-4, 5e-5, 3e-3)
"""Every contestant has the same range. AdamW divides by the size of the gradient, so losses of any scale need similar rates."""
NOISE = Knob("noise level", ("rollout.transition.noise_level",), 0.7, 0.3, 1.0, log=False)

FAST = {"mode": "window", "size": 2, "low": 0, "high": 4}
SDE = {"kind": "sde", "noise_level": 0.7}
ODE = {"rollout": {"num_steps": 6, "transition": {"kind": "ode"}}}
"""The rollout for objectives that need only the images."""
BATCH = {"kind": "batch"}
LEAVE_ONE_OUT = {"kind": "group", "baseline": "leave_one_out", "scale": "none", "clip": None}


def _clipped(surrogate: str, clip: float, **more: Any) -> dict[str, Any]:
    return {"kind": "policy_gradient", "surrogate": surrogate, "clip_low": clip, "clip_high": clip, **more}


def _dppo(limit: float) -> dict[str, Any]:
    return {"kind": "policy_gradient", "surrogate": "dppo", "kl_limit": limit}


def _clip(default: float, low: float, high: float) -> Knob:
    return Knob("clip", ("objective.clip_low", "objective.clip_high"), default, low, high)


REINFORCE = {"kind": "policy_gradient", "surrogate": "reinforce"}

# With one optimizer step per rollout the ratio is 1, and clip, gspo, cispo, dppo and reinforce have the same gradient. Algorithms
# that differ in their use of the ratio therefore take four optimizer steps per rollout.
DENOISING = (
    Contestant(
        "Flow-GRPO",
        "2505.05470",
        {
            "rollout.transition": SDE,
            "rollout.window": {"mode": "all"},
            "objective": _clipped("clip", 1e-4, kl={"kind": "closed", "weight": 0.04}),
        },
        (LEARNING_RATE, NOISE, Knob("KL weight", ("objective.kl.weight",), 0.04, 1e-3, 0.1)),
    ),
    Contestant("Flow-GRPO-Fast", "2505.05470", {"rollout.transition": SDE, "rollout.window": FAST}, (LEARNING_RATE, NOISE)),
    Contestant(
        "MixGRPO",
        "2507.21802",
        {"rollout.transition": SDE, "rollout.window": {"mode": "sliding", "size": 2, "every": 4}},
        (LEARNING_RATE, NOISE, Knob("steps per window", ("rollout.window.every",), 4, choices=(2, 4, 8))),
    ),
    Contestant(
        "branching", "2508.04324", {"rollout.transition": SDE, "rollout.window": {**FAST, "mode": "branch"}}, (LEARNING_RATE, NOISE)
    ),
    Contestant(
        "TempFlow-GRPO",
        "2508.04324",
        {
            "rollout.transition": SDE,
            "rollout.window": {"mode": "branch", "size": 1},
            "objective": _clipped("clip", 1e-4, step_weights="noise"),
        },
        (LEARNING_RATE, NOISE),
    ),
    Contestant("Flow-CPS", "2509.05952", {"rollout.window": FAST}, (LEARNING_RATE, NOISE)),
    Contestant(
        "DanceGRPO",
        "2505.07818",
        {
            "rollout.transition": {"kind": "dance", "noise_level": 0.3},
            "rollout.window": {"mode": "all"},
            "rollout.shared_noise": True,
        },
        (LEARNING_RATE, Knob("noise level", ("rollout.transition.noise_level",), 0.3, 0.1, 0.7)),
    ),
    Contestant(
        "GRPO-Guard",
        "2510.22319",
        {"minibatches": 4, "rollout.transition": SDE, "objective": _clipped("clip", 2e-6, ratio_norm=True)},
        (LEARNING_RATE, _clip(2e-6, 1e-6, 1e-3)),
    ),
    Contestant(
        "GSPO", "2507.18071", {"minibatches": 4, "objective": _clipped("gspo", 3e-4)}, (LEARNING_RATE, _clip(3e-4, 1e-5, 1e-3))
    ),
    Contestant(
        "CISPO",
        "2506.13585",
        {"minibatches": 4, "objective": {"kind": "policy_gradient", "surrogate": "cispo", "clip_high": 1e-3}},
        (LEARNING_RATE, Knob("clip", ("objective.clip_high",), 1e-3, 1e-5, 1e-2)),
    ),
    Contestant(
        "Flow-DPPO",
        "2606.11025",
        {"minibatches": 4, "rollout.transition": SDE, "objective": _dppo(1e-5)},
        (LEARNING_RATE, Knob("KL limit", ("objective.kl_limit",), 1e-5, 1e-7, 1e-3)),
    ),
    Contestant("REINFORCE", "Williams 1992", {"advantage": BATCH, "objective": REINFORCE}, (LEARNING_RATE, NOISE)),
    Contestant("RLOO", "2402.14740", {"advantage": LEAVE_ONE_OUT, "objective": REINFORCE}, (LEARNING_RATE, NOISE)),
    Contestant(
        "PPO, batch",
        "1707.06347",
        {"advantage": BATCH, "epochs": 2, "minibatches": 2},
        (LEARNING_RATE, Knob("epochs", ("epochs",), 2, choices=(1, 2, 4)), _clip(1e-4, 1e-5, 1e-3)),
    ),
    Contestant(
        "PPO, value head",
        "1707.06347",
        {"advantage": {"kind": "gae"}},
        (LEARNING_RATE, NOISE, Knob("learning rate of the head", ("advantage.head.learning_rate",), 3e-3, 1e-3, 3e-2)),
        tasks_for_groups=True,
    ),
    Contestant(
        "DiffusionNFT",
        "2509.16117",
        {**ODE, "objective": {"kind": "nft", "beta": 1.0, "shift": 3, "old_decay": {"rate": 0.001, "max": 0.5}}},
        (LEARNING_RATE, Knob("beta", ("objective.beta",), 1.0, 0.1, 2.0)),
    ),
    Contestant(
        "AWM",
        "2509.25050",
        {**ODE, "objective": {"kind": "awm", "shift": 3, "reference_weight": 0.1}},
        (LEARNING_RATE, Knob("reference weight", ("objective.reference_weight",), 0.1, 0.01, 1.0)),
    ),
    Contestant(
        "AWM, NormGuard",
        "2606.27771",
        {**ODE, "objective": {"kind": "awm", "shift": 3, "reference_weight": 0.1, "norm_guard": {"weight": 0.1}}},
        (LEARNING_RATE, Knob("weight of the hinge", ("objective.norm_guard.weight",), 0.1, 0.01, 10.0)),
    ),
    Contestant(
        "DPO, online",
        "2311.12908",
        {**ODE, "objective": {"kind": "dpo", "shift": 3, "beta": 2000.0}},
        (LEARNING_RATE, Knob("beta", ("objective.beta",), 2000.0, 100.0, 10000.0)),
    ),
    Contestant(
        "DGPO",
        "2510.08425",
        {**ODE, "objective": {"kind": "dgpo", "shift": 3, "beta": 100.0}},
        (LEARNING_RATE, Knob("beta", ("objective.beta",), 100.0, 10.0, 5000.0)),
    ),
    Contestant(
        "CRD",
        "2603.14128",
        {**ODE, "objective": {"kind": "crd", "shift": 3, "beta": 1.0, "reference_weight": 0.1}},
        (LEARNING_RATE, Knob("beta", ("objective.beta",), 1.0, 0.1, 10.0)),
    ),
    Contestant(
        "RAFT",
        "2304.06767",
        {**ODE, "advantage": {"kind": "best", "keep": 2}, "objective": {"kind": "awm", "shift": 3, "samples": 4}},
        (LEARNING_RATE, Knob("images kept", ("advantage.keep",), 2, choices=(1, 2, 4))),
    ),
    Contestant(
        "RWR",
        "2302.12192",
        {**ODE, "advantage": {"kind": "exponential", "temperature": 0.5}, "objective": {"kind": "awm", "shift": 3}},
        (LEARNING_RATE, Knob("temperature", ("advantage.temperature",), 0.5, 0.1, 3.0)),
    ),
    # Images are sampled with 6 steps like those of RAFT, and the student makes its images of held-out tasks with 2.
    Contestant(
        "best-of-n distillation",
        "2304.06767, 2209.03003",
        {
            **ODE,
            "advantage": {"kind": "best", "keep": 2},
            "objective": {"kind": "awm", "noise": "initial", "shift": 3, "samples": 4},
            "eval.num_steps": 2,
        },
        (LEARNING_RATE, Knob("images kept", ("advantage.keep",), 2, choices=(1, 2, 4))),
    ),
    Contestant(
        "dynamic sampling",
        "2503.14476",
        {"rollout.window": FAST, "rollout.refill": {"rounds": 2}},
        (LEARNING_RATE, NOISE, Knob("rounds", ("rollout.refill.rounds",), 2, choices=(1, 2))),
    ),
    # Upper references: these two use the gradient of the distance to the target image, the others only the rewards of the judge.
    Contestant(
        "DRaFT",
        "2309.17400",
        {**ODE, "objective": {"kind": "draft", "steps": 2, "reward": {"kind": "target"}}},
        (LEARNING_RATE, Knob("steps with gradient", ("objective.steps",), 2, choices=(1, 2, 4))),
    ),
    Contestant(
        "ReFL",
        "2304.05977",
        {**ODE, "objective": {"kind": "refl", "low": 2, "reward": {"kind": "target"}}},
        (LEARNING_RATE, Knob("first step", ("objective.low",), 2, choices=(0, 2, 4))),
    ),
)
GDPO = Contestant(
    "GDPO",
    "2601.05242",
    {
        "minibatches": 4,
        "rollout.transition": SDE,
        "reward.combine": {"IF": 0.5, "IP": 0.5},
        "advantage": {"kind": "gdpo", "weights": {"IF": 0.5, "IP": 0.5}},
    },
    (LEARNING_RATE, Knob("weight of IP", ("advantage.weights.IP",), 0.5, 0.1, 1.0)),
)
"""For an exact judge of edits alone: the judges that err have a single column."""
TOKENS = (
    Contestant(
        "GRPO", "2402.03300", {"minibatches": 4, "objective": _clipped("clip", 0.2)}, (LEARNING_RATE, _clip(0.2, 0.05, 0.5))
    ),
    Contestant(
        "GSPO", "2507.18071", {"minibatches": 4, "objective": _clipped("gspo", 3e-2)}, (LEARNING_RATE, _clip(3e-2, 3e-3, 0.3))
    ),
    Contestant(
        "CISPO",
        "2506.13585",
        {"minibatches": 4, "objective": {"kind": "policy_gradient", "surrogate": "cispo", "clip_high": 0.5}},
        (LEARNING_RATE, Knob("clip", ("objective.clip_high",), 0.5, 0.1, 0.9)),
    ),
    Contestant(
        "DPPO",
        "2602.04879",
        {"minibatches": 4, "objective": _dppo(0.05)},
        (LEARNING_RATE, Knob("KL limit", ("objective.kl_limit",), 0.05, 5e-3, 0.5)),
    ),
    Contestant("REINFORCE", "Williams 1992", {"advantage": BATCH, "objective": REINFORCE}, (LEARNING_RATE,)),
    Contestant("RLOO", "2402.14740", {"advantage": LEAVE_ONE_OUT, "objective": REINFORCE}, (LEARNING_RATE,)),
    Contestant(
        "PPO, batch",
        "1707.06347",
        {"advantage": BATCH, "epochs": 2, "minibatches": 2, "objective": _clipped("clip", 0.2)},
        (LEARNING_RATE, Knob("epochs", ("epochs",), 2, choices=(1, 2, 4)), _clip(0.2, 0.05, 0.5)),
    ),
    Contestant(
        "PPO, value head",
        "1707.06347",
        {"advantage": {"kind": "gae"}, "minibatches": 4, "objective": _clipped("clip", 0.2)},
        (LEARNING_RATE, Knob("learning rate of the head", ("advantage.head.learning_rate",), 3e-3, 1e-3, 3e-2)),
        tasks_for_groups=True,
    ),
)
