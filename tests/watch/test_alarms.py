"""The rules of a recipe's watch on artificial observations: each raises its alarm for its own reason and for no other."""

import math

import pytest
import torch

from retouch.recipe.keys import Canaries, HeldOutJudge, PaintedText, Watch
from retouch.records.files import write_json
from retouch.run.watch import Observation, canary_shift, diversity_ratio, find_alarms, paired_change, read_observations, since_best
from retouch.types import Column

COLUMNS = {"score": Column(0.0, 10.0), "other": Column(-1.0, 1.0)}
WATCH = Watch(
    judge=HeldOutJudge(reward={"kind": "playground", "combine": {"exact": 1.0}}), canaries=Canaries(count=3), text=PaintedText()
)
QUIET = {"brightness": 0.5, "saturation": 0.4, "detail": 0.02, "preservation": 0.9, "text_to_judge": 0.0}


def look(step, *, proxy=0.0, heldout=0.0, canaries=(5.0, 6.0, 7.0), **means):
    """An observation of eight tasks whose scores scatter the same way around the given means."""
    scatter = torch.tensor([-3.0, -2, -1, 0, 0, 1, 2, 3])
    scores = {"proxy": proxy + scatter, "heldout": heldout + scatter.flip(0)}
    scores |= {name: torch.full((8,), value) for name, value in (QUIET | means).items()}
    tasks = tuple(f"task {k}" for k in range(8))
    return Observation(step, tasks, scores, {"score": torch.tensor(canaries), "other": torch.zeros(3)}, "judge")


def rules(*looks, watch=WATCH, diversity=()):
    return [one.rule for one in find_alarms(watch, looks, diversity, COLUMNS)]


def with_scatter(made, name, amount):
    """The same observation, with a difference for each task; the mean of the differences is 0."""
    wave = amount * torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1])
    return Observation(made.step, made.tasks, {**made.scores, name: made.scores[name] + wave}, made.canaries)


def test_paired_change_is_measured_in_standard_errors_of_the_differences():
    def change(before: list[float], after: list[float], sources=()):
        made = [Observation(0, (), {"heldout": torch.tensor(scores)}, sources=sources) for scores in (before, after)]
        return paired_change(*made, "heldout")

    before, after = [1.0, 2, 3, math.nan], [2.0, 4, 6, 9]
    found = change(before, after)
    assert found.mean == 2
    assert found.sigmas == pytest.approx(2 / (1 / math.sqrt(3)))
    assert change(before, before).sigmas == 0
    assert change(before[:3], [score - 1 for score in before[:3]]).sigmas == -math.inf
    assert change(before[:1], after[:1]).sigmas == 0
    assert math.isnan(change(before[3:], after[3:]).mean)
    assert change([1.0, 1, 2, 2], [2.0, 2, 5, 5], ("a", "a", "b", "b")).sigmas == pytest.approx(2.0)  # changes 1 and 3


def test_unchanged_observations_raise_no_alarm():
    assert rules(look(0)) == []
    assert rules(look(0), look(10), diversity=[0.2] * 40) == []


def test_judge_alarm_is_raised_if_the_held_out_judge_falls_and_the_reward_does_not():
    start, fell = look(0), with_scatter(look(10, proxy=1, heldout=-1), "heldout", 0.5)
    (alarm,) = find_alarms(WATCH, [start, fell], [], COLUMNS)
    assert (alarm.rule, alarm.response) == ("judge", "note")
    assert "since step 0" in alarm.text
    assert "fell by 1 (" in alarm.text
    assert "rose by 1" in alarm.text
    assert rules(start, look(10, proxy=1, heldout=1)) == []  # both rise
    assert rules(start, look(10, proxy=-1, heldout=-1)) == []  # both fall: the policy is worse, and the reward shows it
    assert rules(start, look(10, heldout=-1)) == ["judge"]  # the reward does not fall
    assert rules(start, with_scatter(look(10, proxy=1, heldout=-1), "heldout", 3)) == []  # within its noise


def test_judge_alarm_compares_with_the_best_held_out_score():
    looks = [look(0), look(10, proxy=1, heldout=2), look(20, proxy=2, heldout=1)]
    assert rules(*looks) == ["judge"]
    best, proxy, heldout = since_best(looks)
    assert (best.step, proxy.mean, heldout.mean) == (10, 1, -1)
    assert rules(looks[0], looks[2]) == []


def test_missing_scores_of_the_held_out_judge_raise_no_alarm():
    silent = look(10, proxy=1)
    silent.scores["heldout"][:] = math.nan
    assert rules(look(0), silent) == []
    assert rules(silent, look(10, proxy=2)) == []
    assert math.isnan(since_best([look(0), silent])[2].mean)


def test_canary_alarm_is_raised_if_the_judge_scores_the_same_images_differently():
    start = look(0)
    assert rules(start, look(10, canaries=(5.4, 6.0, 7.0))) == []
    assert rules(start, look(10, canaries=(5.0, 4.0, 9.0))) == ["canaries"]  # same mean, other scores of the images
    assert canary_shift(look(10, canaries=(5.0, 4.0, 9.0)), start, COLUMNS) == ("score", pytest.approx(4 / 3 / 10))
    assert rules(start, look(10, canaries=(math.nan, math.nan, math.nan))) == []
    assert rules(start, look(10, canaries=(math.nan, 6.0, 9.0))) == ["canaries"]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("brightness", 0.39, 0.61), ("saturation", 0.29, 0.51), ("detail", 0.013, 0.031), ("preservation", 0.79, None)],
)
def test_image_statistics_outside_their_limits_raise_an_alarm(name, low, high):
    start = look(0)
    assert rules(start, look(10, **{name: low})) == [name]
    assert rules(start, look(10, **{name: high or 1.0})) == ([name] if high else [])
    assert rules(start, look(10, **{name: 0.95 * QUIET[name]})) == []
    assert rules(start, look(10, **{name: math.nan})) == []
    assert rules(start, look(10, **{name: low}), watch=Watch(**{name: None})) == []


def test_text_alarm_is_raised_if_text_to_judge_increases():
    assert rules(look(0), look(10, text_to_judge=0.25)) == ["text"]
    assert rules(look(0, text_to_judge=0.25), look(10, text_to_judge=0.25)) == []


def test_diversity_alarm_is_raised_if_the_diversity_of_groups_drops():
    shrinking = [0.2] * 10 + [0.15] * 5 + [0.09] * 10
    assert rules(look(0), look(25), diversity=shrinking) == ["diversity"]
    assert rules(look(0), look(25), diversity=[0.2] * 10 + [0.11] * 10) == []
    assert rules(look(0), look(19), diversity=[0.2] * 10 + [0.0] * 9) == []  # not yet two windows
    assert diversity_ratio([math.nan, 0.4, 0.2, 0.1], 1) == pytest.approx(0.25)
    assert math.isnan(diversity_ratio([0.0, 0.0], 1))


def test_observations_are_stored_and_loaded_bitwise(tmp_path):
    assert read_observations(tmp_path, 5) == []
    first, second = look(0, heldout=1 / 3), look(10)
    first.scores["preservation"][:] = math.nan
    for made in (second, first):
        write_json(tmp_path / f"step-{made.step:06d}.json", made.to_json())
    assert [kept.step for kept in read_observations(tmp_path, 10)] == [0, 10]
    assert [kept.step for kept in read_observations(tmp_path, 9)] == [0]
    kept, _ = read_observations(tmp_path, 10)
    assert (kept.tasks, kept.judge) == (first.tasks, "judge")
    for name, column in first.scores.items():
        torch.testing.assert_close(kept.scores[name], column, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kept.canaries["score"], first.canaries["score"])
