"""The held-out table, the times of stages, the details of samples, and the preflight."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import tiny_loop
import tiny_policies as tiny
import tiny_writers
import tiny_writing
from retouch.distributed.ranks import Ranks
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.decoding import AutoregressiveTrajectory
from retouch.recipe.keys import Samples
from retouch.records.folder import RunFolder
from retouch.records.trackers import CompositeTracker
from retouch.renderers.base import LatentRenderer
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.run import preflight
from retouch.run.evaluation import EvaluationResult, Evaluator, headline_tasks, score_table
from retouch.run.metrics import Clock
from retouch.run.recorder import Recorder, SampleDetails
from retouch.run.step import ScoredRollout, collect
from retouch.types import Batch, Column, Completion, Kind, Prompts, Sample, Task
from tiny_recipes import SMALL
from warm_python import run_python

# The held-out table


def evaluated() -> EvaluationResult:
    tasks = [Task(id=str(i), instruction="x", tags={"complexity": "1" if i < 1 else "2"}) for i in range(4)]
    overall = torch.tensor([8.0, 1.0, 3.0, float("nan")])
    return EvaluationResult(tasks, {"overall": overall}, overall)


def test_score_table_has_a_row_per_tag_value_with_means_and_confidence_intervals() -> None:
    """A headline has a row of its own only if it is a subset."""
    some = evaluated()
    means, intervals = score_table(some)
    assert list(means) == ["all", "complexity=1", "complexity=2"]
    assert means["all"] == {"n": 4, "reward": 4.0, "overall": 4.0}
    assert intervals == {"all": {}, "complexity=1": {}, "complexity=2": {}}, "3 scores are too few"
    means, _ = score_table(some, headline_tasks(some.tasks, {"complexity": ["2"]}))
    assert list(means) == ["all", "headline", "complexity=1", "complexity=2"]
    assert means["headline"] == means["complexity=2"]
    assert "headline" not in score_table(some, headline_tasks(some.tasks, None))[0]


def test_tasks_of_one_source_are_a_cluster_in_the_score_table_and_in_the_stored_evaluation() -> None:
    """Eight photographs with two tasks each contain no more information than eight tasks if the tasks of each have equal scores."""
    scores = torch.tensor([8.0, 1.0, 3.0, 4.0, 9.0, 2.0, 0.0, 5.0])
    values = scores.repeat_interleave(2)
    tasks = [Task(id=str(i), instruction="x", source=f"photo {i // 2}") for i in range(16)]
    result = EvaluationResult(tasks, {"overall": values}, values, shares=("overall",))
    _, intervals = score_table(replace(result, shares=()))
    alone = [Task(id=str(i), instruction="x") for i in range(8)]
    single = score_table(EvaluationResult(alone, {"overall": scores}, scores))[1]["all"]["overall"]
    assert intervals["all"]["overall"] == pytest.approx(single)
    assert 0 < single[0] < 4 < single[1] < 9
    one = [replace(task, source="photo") for task in tasks]
    assert score_table(EvaluationResult(one, {"overall": values}, values))[1]["all"] == {}
    assert score_table(EvaluationResult(one, {"right": values / 8}, values / 8, shares=("right",)))[1]["all"] == {}
    assert result.to_json()["sources"] == [task.source for task in tasks]
    assert "sources" not in evaluated().to_json()


def test_reward_in_the_score_table_is_the_combined_reward_even_if_a_column_has_this_name() -> None:
    tasks = [Task(id=str(i), instruction="x") for i in range(2)]
    result = EvaluationResult(tasks, {"reward": torch.ones(2), "overall": torch.zeros(2)}, torch.tensor([0.25, 0.75]))
    assert score_table(result)[0]["all"] == {"n": 2, "reward": 0.5, "overall": 0.0}


def test_confidence_intervals_of_proportions_are_wilson_intervals() -> None:
    """Wilson's interval of 10 of 10 and of 5 of 10, as in published tables; the normal approximation of the first is [1, 1]."""
    for share, low, high in ((1.0, 0.7225, 1.0), (0.5, 0.2366, 0.7634)):
        values = torch.arange(10) < 10 * share
        result = EvaluationResult([Task(id=str(i), instruction="x") for i in range(10)], {"right": values.float()}, values.float())
        _, intervals = score_table(replace(result, shares=("right",)))
        assert intervals["all"]["right"] == pytest.approx((low, high), abs=1e-4)
        again = EvaluationResult.from_json(replace(result, shares=("right",)).to_json(), result.tasks)
        assert score_table(again)[1]["all"]["right"] == intervals["all"]["right"]
        assert "shares" not in result.to_json()


class Said:
    """Renders a grey image whose value depends on every token id of the completion."""

    def __call__(self, tasks, trajectory):
        return [Image.new("L", (1, 1), sum(written.ids) % 251) for written in trajectory.outputs]


class Grey:
    columns: Mapping[str, Column] = {"grey": Column(0.0, 255.0)}

    def __call__(self, samples):
        return {"grey": torch.tensor([float(sample.image.getpixel((0, 0))) for sample in samples])}


def test_evaluation_submits_all_batches_before_it_waits_for_scores() -> None:
    """No score arrives before the last batch is submitted. So a dead judge costs one deadline, and not one for each batch."""
    tasks = tiny_writers.tasks()
    judge = RewardScorer(Grey(), {"grey": 1.0})
    asked: list[tuple[Future, list]] = []

    def patient(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
        asked.append((Future(), samples))
        if len(asked) == len(tasks):
            for future, waiting in asked:
                future.set_result(judge(waiting))
        return asked[-1][0]

    one_by_one = Evaluator(tasks=tasks, renderer=Said(), judge=patient, ranks=Ranks(), seed=0, batch=1)
    at_once = replace(one_by_one, judge=judge.for_split("heldout", 0), batch=len(tasks))
    policy = tiny_writing.policy()
    assert torch.equal(one_by_one(policy).rewards, at_once(policy).rewards)
    judge.close()


def test_writer_evaluation_is_deterministic_and_best_of_k_increases_with_k() -> None:
    """For a column where lower is better, the best of k is the lowest."""
    tasks = tiny_writers.tasks()
    with closing(RewardScorer(Grey(), {"grey": 1.0})) as judge:
        scored = judge.for_split("heldout", 0)
        evaluate = Evaluator(tasks=tasks, renderer=Said(), judge=scored, ranks=Ranks(), seed=0, batch=len(tasks))
        policy = tiny_writing.policy()
        likeliest = evaluate(policy).rewards
        assert torch.equal(likeliest, evaluate(policy).rewards)
        one, three, eight = (evaluate.best_of(policy, k=k).rewards for k in (1, 3, 8))
        assert (eight >= three).all()
        assert (eight > three).any()
        lowest = replace(evaluate, lower_is_better=["grey"]).best_of(policy, k=8).scores["grey"]
        assert (lowest <= one).all()
        assert (lowest < eight).any()


# The times of a step's stages, measured with the host's clock and with events of a GPU


@dataclass
class Queue:
    """A GPU that starts work when the work before is finished. ``now``: the host's seconds. ``free``: when its work is finished."""

    now: float = 0.0
    free: float = 0.0

    def compute(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds

    def event(self) -> "Point":
        return Point(self)


@dataclass
class Point:
    queue: Queue
    at: float = field(default=-1.0)

    def record(self) -> None:
        self.at = max(self.queue.now, self.queue.free)

    def query(self) -> bool:
        return self.at <= self.queue.now

    def elapsed_time(self, end: "Point") -> float:
        assert end.query(), "the GPU has not reached it"
        return 1000 * (end.at - self.at)


def test_pending_gpu_work_of_a_rollout_is_not_counted_as_rendering_time() -> None:
    gpu = Queue()
    clock = Clock(event=gpu.event)
    with clock("rollout"):
        gpu.compute(5)
        gpu.now += 0.1  # the host is ahead
    with clock("render"):
        gpu.compute(1)
        gpu.now = gpu.free  # the images are read
    assert clock.take() == {"time/rollout": pytest.approx(5), "time/render": pytest.approx(1)}


def test_clock_does_not_wait_for_the_gpu_and_counts_every_second_once() -> None:
    gpu = Queue()
    clock = Clock(event=gpu.event)
    with clock("rollout"):
        gpu.compute(2)
    gpu.now = 3
    with clock("judge"):
        gpu.now += 4  # waits for another machine; the GPU is idle
    with clock("update"):
        gpu.compute(6)
    assert clock.take() == {"time/rollout": pytest.approx(2), "time/judge": pytest.approx(4)}
    assert gpu.now == 7
    with clock("update"):
        gpu.compute(1)
    gpu.now = 20
    assert clock.take() == {"time/update": pytest.approx(7)}
    assert clock.take() == {}
    with pytest.raises(ValueError, match="x"), clock("judge"):
        raise ValueError("x")
    assert clock.stage == "judge"
    assert clock.take() == {"time/judge": 0.0}


# Details that are stored with training samples


def stored(folder: RunFolder, made: ScoredRollout, details: SampleDetails | None) -> list[dict[str, Any]]:
    folder.create()
    Recorder(folder, CompositeTracker([]), total=1, samples=Samples(groups=2), details=details).groups(1, made)
    return folder.read_samples(1)


def test_denoising_states_are_stored_for_the_first_sample_of_each_group_if_enabled(tmp_path: Path) -> None:
    policy = tiny.policy(mode="all")
    made = collect(tiny_loop.run(policy), tiny_loop.phase(count=2, group_size=2, steps=range(1)), 0)
    folder = RunFolder(tmp_path / "run")
    lines = stored(folder, made, SampleDetails(policy.model, tokens=True, states=True))
    assert ["states" in line for line in lines] == [True, False, True, False]
    count = made.trajectory.latents.shape[1]
    assert [len(line["states"]) for line in lines if "states" in line] == [count, count]
    assert all("tokens" not in line for line in lines)
    trajectory = made.trajectory.take(slice(2, 3))
    for place, name in enumerate(lines[2]["states"]):
        state = replace(trajectory, outputs=trajectory.latents[:, place])
        (expected,) = LatentRenderer(policy.model)([made.batch.tasks[1]], state)
        assert expected is not None
        with Image.open(folder.samples(1) / name) as written:
            assert written.tobytes() == expected.tobytes()
    plain = stored(RunFolder(tmp_path / "plain"), made, None)
    assert plain == stored(RunFolder(tmp_path / "off"), made, SampleDetails(policy.model, tokens=True, states=False))
    assert not {"states", "tokens"} & set(plain[0])


def test_token_details_list_only_sampled_text_tokens_with_their_log_probabilities() -> None:
    text, image = Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN
    none = torch.zeros(1, 1, dtype=torch.long)
    trajectory = AutoregressiveTrajectory(
        log_probs=torch.tensor([[-0.5, 0.0, -2.0, -9.0], [-1.0, -1.0, -1.0, -1.0]]),
        mask=torch.tensor([[True, False, True, False], [True, True, True, True]]),
        kind=torch.tensor([[text] * 4, [image] * 4]),
        outputs=(Completion((0, 1, 2), "abc", False), Completion((0, 1, 2, 3), "", False)),
        ids=torch.tensor([[0, 1, 2, 9], [0, 1, 2, 3]]),
        lengths=torch.tensor([3, 4]),
        prompts=Prompts(none, none == 0, none[..., None], ({},)),
        **{"vocabulary": torch.zeros(2, 4, dtype=torch.long), "support": None, "behaviour_log_probs": None},
        group=torch.tensor([0, 0]),
    )
    spells: Any = SimpleNamespace(decode=lambda ids: "".join(chr(97 + number) for number in ids))
    details = SampleDetails(spells, tokens=True, states=True)
    assert details.tokens(trajectory, 0) == [("a", -0.5), ("c", -2.0)]  # the second was forced, and the last is padding
    assert details.tokens(trajectory, 1) is None
    assert SampleDetails(spells, tokens=False, states=True).tokens(trajectory, 0) is None


# The preflight

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.slow), "lora"])
def preflight_result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of ``preflight_memory`` on a simulated device."""
    file = tmp_path_factory.mktemp("recipe") / "recipe.json"
    train = {"kind": "full"} if request.param == "full" else SMALL["policy"]["train"]
    policy = {**SMALL["policy"], "train": train}
    file.write_text(json.dumps({**SMALL, "policy": policy}))
    found: dict[str, Any] = json.loads(run_python(SUPPORT / "preflight_memory.py", file, search=[SUPPORT]))
    return found


def test_preflight_keeps_no_copy_of_the_weights_on_the_device_and_restores_every_bit(preflight_result: dict[str, Any]) -> None:
    assert preflight_result["trained"] > 10_000
    # A sum and a sum of absolute values of each frozen tensor, in fp64.
    assert preflight_result["during"] - preflight_result["before"] < 0.02 * preflight_result["before"]
    checks = {name: ok for name, ok in preflight_result["checks"].items() if name != "frozen_gradient"}  # only a LoRA has this one
    assert checks == dict.fromkeys(("ratio_before", "gradient", "moved", "ratio_after", "frozen"), True)
    assert preflight_result["restored"]
    assert preflight_result["moments_on"] == ["pretend:0"], "a resumed optimizer has its moments on the device"


@pytest.mark.parametrize(
    ("dtype", "objective", "limit"),
    [
        (torch.float32, {"clip_low": 1e-5, "clip_high": 1e-5}, 1e-6),
        (torch.bfloat16, {"clip_low": 1e-5, "clip_high": 2e-5}, 1e-6),
        (torch.bfloat16, {"clip_low": 0.2, "clip_high": 0.2}, 1e-2),
        (torch.bfloat16, {"clip_low": 3e-4, "clip_high": 4e-4, "surrogate": "gspo"}, 3e-5),
    ],
)
def test_ratio_limit_depends_on_dtype_and_clip_range(dtype: torch.dtype, objective: dict[str, Any], limit: float) -> None:
    policy = tiny.policy(train="full")
    minibatch: Any = SimpleNamespace(trajectory=policy.rollout(tiny.batch()))
    policy.module.to(dtype)
    run: Any = SimpleNamespace(policy=policy)
    assert preflight._ratio_limit(run, PolicyGradient(kind="policy_gradient", **objective), minibatch) == pytest.approx(limit)
