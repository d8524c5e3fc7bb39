"""The held-out table: means, confidence intervals, the headline row."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from PIL import Image

import tiny_writers
import tiny_writing
from retouch.distributed.ranks import Ranks
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.run.evaluation import EvaluationResult, Evaluator, headline_tasks, score_table
from retouch.types import Batch, Column, Sample, Task


def evaluated() -> EvaluationResult:
    tasks = [Task(id=str(i), instruction="x", tags={"complexity": "1" if i < 1 else "2"}) for i in range(4)]
    overall = torch.tensor([8.0, 1.0, 3.0, float("nan")])
    return EvaluationResult(tasks, {"overall": overall}, overall)


def test_score_table_has_a_row_per_tag_value_with_means_and_confidence_intervals() -> None:
    means, intervals = score_table(evaluated())
    assert list(means) == ["all", "complexity=1", "complexity=2"]
    assert means["all"] == {"n": 4, "reward": 4.0, "overall": 4.0}
    half = 4.302653 * math.sqrt(13.0) / math.sqrt(3)  # t(2), and the variance of 8, 1 and 3
    assert intervals["all"]["overall"] == pytest.approx((4.0 - half, 4.0 + half))


def test_tasks_of_one_source_are_a_cluster_in_the_score_table_and_in_the_stored_evaluation() -> None:
    """Three photographs with two tasks each contain no more information than three tasks if the tasks of each have equal scores."""
    values = torch.tensor([8.0, 8.0, 1.0, 1.0, 3.0, 3.0])
    tasks = [Task(id=str(i), instruction="x", source=f"photo {i // 2}") for i in range(6)]
    result = EvaluationResult(tasks, {"overall": values}, values, shares=("overall",))
    _, intervals = score_table(replace(result, shares=()))
    assert intervals["all"]["overall"] == pytest.approx(score_table(evaluated())[1]["all"]["overall"])
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


def test_score_table_has_a_headline_row_only_if_the_headline_is_a_subset() -> None:
    some = evaluated()
    means, _ = score_table(some, headline_tasks(some.tasks, {"complexity": ["2"]}))
    assert list(means) == ["all", "headline", "complexity=1", "complexity=2"]
    assert means["headline"] == means["complexity=2"]
    assert "headline" not in score_table(some, headline_tasks(some.tasks, None))[0]


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
    tasks = tiny_writers.tasks()
    judge = RewardScorer(Grey(), {"grey": 1.0})
    evaluate = Evaluator(tasks=tasks, renderer=Said(), judge=judge.for_split("heldout", 0), ranks=Ranks(), seed=0, batch=len(tasks))
    policy = tiny_writing.policy()
    likeliest = evaluate(policy).rewards
    assert torch.equal(likeliest, evaluate(policy).rewards)
    three, eight = (evaluate.best_of(policy, k=k).rewards for k in (3, 8))
    assert (eight >= three).all()
    assert (eight > three).any()
    judge.close()


def test_best_of_k_is_the_lowest_score_of_a_column_where_lower_is_better() -> None:
    tasks = tiny_writers.tasks()
    judge = RewardScorer(Grey(), {"grey": 1.0})
    higher = Evaluator(tasks=tasks, renderer=Said(), judge=judge.for_split("heldout", 0), ranks=Ranks(), seed=0, batch=len(tasks))
    policy = tiny_writing.policy()
    samples = [higher.best_of(policy, k=k).scores["grey"] for k in (1, 8)]
    lowest = replace(higher, lower_is_better=["grey"]).best_of(policy, k=8).scores["grey"]
    assert (lowest <= samples[0]).all()
    assert (lowest < samples[1]).any()
    judge.close()
