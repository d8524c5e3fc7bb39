"""Statistics of votes: golden values that were computed by hand, and simulated voters whose truth is known."""

import math

import numpy as np
import pytest

from retouch_view.votes.commands import Calibration, Preference, calibrate, isotonic
from retouch_view.votes.log import VoteLog
from retouch_view.votes.reward import fit, preferences
from retouch_view.votes.statistics import as_text, judge_agreement, summarise, table, voter_agreement, voters, win_rates
from vote_maker import VoteMaker


@pytest.fixture
def vote():
    return VoteMaker()


def test_win_rates_count_ties_as_one_half(vote):
    votes = [
        vote("left", task="1", left="new", right="base"),
        vote("right", task="2", left="base", right="new"),
        vote("right", task="3", left="new", right="base"),
        vote("tie", task="4", left="new", right="base"),
        vote("both_bad", task="5", left="new", right="base"),
        vote("left", task="6", left="x", right="y", arms=("", "")),
    ]
    (found,) = win_rates(votes)
    assert (found.arm, found.other, found.ties) == ("new", "base", 2)
    assert (found.share.value, found.share.count, found.share.clusters) == (pytest.approx(3 / 5), 5, 5)
    (found,) = win_rates([vote("left", left="run step 40", right="run step 120")])  # steps are ordered as numbers
    assert (found.arm, found.share.value) == ("run step 120", 0.0)


def test_judge_agreement_matches_hand_computation(vote):
    votes = [
        vote("left", task="1", scores=({"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 1.0}), tags={"kind": "add"}),
        vote("right", task="2", scores=({"a": 2.0, "b": 1.0}, {"a": 1.0, "b": 3.0}), tags={"kind": "move"}),
        vote("right", task="3", scores=({"a": 0.0}, {"a": 1.0}), tags={"kind": "add"}),
        vote("tie", task="4", scores=({"a": 0.0}, {"a": 1.0})),
    ]
    found = {(row.column, row.category): (row.share.value, row.share.count, row.ties) for row in judge_agreement(votes)}
    assert found == {
        ("a", "all"): (pytest.approx(2 / 3), 3, 0),
        ("a", "kind=add"): (1.0, 2, 0),
        ("a", "kind=move"): (0.0, 1, 0),
        ("b", "all"): (0.75, 2, 1),
        ("b", "kind=add"): (0.5, 1, 1),
        ("b", "kind=move"): (1.0, 1, 0),
    }
    # Tags with many values are no categories.
    votes = [vote("left", task=str(k), scores=({"a": 2.0}, {"a": 1.0}), tags={"kind": str(k % 2), "id": str(k)}) for k in range(9)]
    assert [row.category for row in judge_agreement(votes)] == ["all", "kind=0", "kind=1"]


def test_strengths_match_hand_computation():
    """Two wins to one: s_a - s_b = log 2. A circle of wins: all equal. One vote with a prior: 1 - sigmoid(2 x) = prior x."""
    assert fit([(0, 1, 1.0), (0, 1, 1.0), (1, 0, 1.0)], count=2, prior=1e-9)[0].tolist() == pytest.approx(
        [math.log(2) / 2, -math.log(2) / 2]
    )
    assert fit([(0, 1, 1.0), (1, 2, 1.0), (2, 0, 1.0)], count=3, prior=0.1)[0].tolist() == pytest.approx([0, 0, 0], abs=1e-9)
    x = fit([(0, 1, 1.0)], count=2, prior=0.5)[0][0]
    assert 1 - 1 / (1 + math.exp(-2 * x)) == pytest.approx(0.5 * x)
    assert fit([(0, 1, 0.5)] * 9, count=2, prior=0.5)[0].tolist() == pytest.approx([0, 0])


def test_preferences_follow_the_strengths_and_are_nan_without_votes():
    found = preferences([(0, 1, 1.0), (1, 2, 1.0)], count=4, prior=0.5)
    assert found[0] > found[1] > found[2]
    assert found[1] == pytest.approx(0.5)
    assert math.isnan(found[3])
    x = fit([(0, 1, 1.0)], count=2, prior=0.5)[0][0]
    assert preferences([(0, 1, 1.0)], count=2, prior=0.5)[0] == pytest.approx(1 / (1 + math.exp(-2 * x)))


def test_table_ranks_arms_by_strength_with_intervals(vote):
    votes = [vote("left", task=str(k), left="b", right="a") for k in range(20)]
    votes += [vote("left" if k < 15 else "right", task=str(k), left="c", right="b") for k in range(20)]
    found = table(votes)
    assert [(row.arm, row.votes) for row in found] == [("c", 20), ("b", 40), ("a", 20)]
    assert sum(row.strength for row in found) == pytest.approx(0, abs=1e-9)
    assert found[0].strength - found[1].strength == pytest.approx(math.log(3), abs=0.1)
    assert all(row.low < row.strength < row.high for row in found)
    assert found[2].high - found[2].low > 2  # it lost every vote, so the size of the difference is uncertain
    assert table(votes[:0]) == []


def test_isotonic_regression_matches_hand_computation():
    assert isotonic([1, 2, 3, 4, 5], [0, 1, 0, 0.5, 1], [1] * 5) == ([1, 2, 3, 4, 5], [0, 0.5, 0.5, 0.5, 1])
    assert isotonic([3, 1, 2, 2], [0, 3, 1, 2], [1, 1, 1, 1]) == ([1, 2, 3], [1.5, 1.5, 1.5])
    assert isotonic([1, 2, 3], [1, 0, 5], [3, 1, 0]) == ([1, 2], [0.75, 0.75])


def scored_votes(vote, count, *, seed):
    """Votes whose left image wins with the probability of its score, against images of other scores."""
    random = np.random.default_rng(seed)
    preference = Preference(noise=0.5)
    made = []
    for number in range(count):
        left, right = random.uniform(0, 2, size=2)
        choice = preference.choose(left, right, uniform=random.uniform())
        made.append(vote(choice, task=str(number // 2), scores=({"score": left}, {"score": right}), left=f"l{number}"))
    return made


def test_calibration_is_monotone_and_less_uncertain_with_more_votes(vote, tmp_path):
    few, many = (calibrate(scored_votes(vote, count, seed=1), "score", resamples=100) for count in (60, 1000))
    grid = np.linspace(0.2, 1.8, 9)
    for made in (few, many):
        assert list(made.probability) == sorted(made.probability)
        assert all(low <= high for low, high in zip(made.low, made.high, strict=True))
    truth = [np.mean([1 / (1 + math.exp(-(score - other) / 0.5)) for other in np.linspace(0, 2, 201)]) for score in grid]
    assert np.abs([many.at(score)[0] - p for score, p in zip(grid, truth, strict=True)]).max() < 0.12
    assert np.mean([many.at(score)[1] for score in grid]) < 0.5 * np.mean([few.at(score)[1] for score in grid])
    assert many.at(-5)[0] == many.probability[0]
    assert many.at(9)[0] == many.probability[-1]
    assert math.isnan(many.at(math.nan)[0])
    many.save(tmp_path / "map.json")
    assert Calibration.load(tmp_path / "map.json") == many


def test_repeated_votes_of_a_task_do_not_change_the_calibration(vote):
    votes = scored_votes(vote, 120, seed=3)
    once, often = (calibrate([each for each in votes for _ in range(times)], "score", resamples=200) for times in (1, 8))
    assert often.probability == pytest.approx(once.probability)
    assert often.sd == pytest.approx(once.sd)


@pytest.mark.parametrize("content", ["{}", "[]", '{"column": "a", "votes": 1, "tasks": 1, "scores": [1, 0]}', "nan", "null"])
def test_a_damaged_calibration_or_one_of_few_tasks_is_refused(tmp_path, vote, content):
    path = tmp_path / "map.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"calibration|map|JSON"):
        Calibration.load(path)
    for count, column, says in ((10, "score", "5 tasks have votes"), (100, "other", "0 tasks have votes")):
        with pytest.raises(ValueError, match=says):
            calibrate(scored_votes(vote, count, seed=0), column)


def test_strength_intervals_have_95_percent_coverage(vote):
    """Half of the votes repeat another vote on the same task, which the clusters account for."""
    random = np.random.default_rng(3)
    truth = {"a": -0.6, "b": 0.0, "c": 0.6}
    pairs = [("a", "b"), ("b", "c"), ("a", "c")]
    covered = []
    for _ in range(400):
        votes = []
        for task in range(45):
            left, right = pairs[task % 3]
            choice = Preference(noise=1.0).choose(truth[left], truth[right], uniform=random.uniform())
            again = choice if task % 2 else Preference(noise=1.0).choose(truth[left], truth[right], uniform=random.uniform())
            votes += [vote(each, task=str(task), left=left, right=right) for each in (choice, again)]
        covered += [row.low <= truth[row.arm] <= row.high for row in table(votes)]
    assert 0.93 <= np.mean(covered) <= 0.97


def answers(vote, answer, *, voter, seed):
    """The votes of one voter on 150 pairs, of which 30 come again with their sides exchanged."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(150):
        left, right = random.normal(size=2)
        made.append(vote(answer(left, right), task=str(number), voter=voter))
        if number % 5 == 0:
            made.append(vote(answer(right, left), task=str(number), voter=voter, left="b", right="a", repeat=True))
    return made


def test_inconsistent_voters_are_detected(vote):
    """Voters who guess or always choose one side are detected; careful voters with noise are nearly always consistent."""
    found: dict[str, list[str]] = {}
    for seed in range(40):
        random = np.random.default_rng(1000 + seed)
        kinds = {
            "careful": lambda left, right, random=random: Preference(noise=0.3).choose(left, right, uniform=random.uniform()),
            "guesses": lambda left, right, random=random: random.choice(["left", "right"]),
            "guesses with ties": lambda left, right, random=random: random.choice(["left", "right", "tie"]),
            "always left": lambda left, right: "left",
        }
        votes = [each for name, answer in kinds.items() for each in answers(vote, answer, voter=name, seed=seed)]
        for row in voters(votes):
            found.setdefault(row.name, []).append(row.status)
    assert found["careful"].count("consistent") >= 38
    for name in ("guesses", "guesses with ties", "always left"):
        assert found[name].count("inconsistent") >= 37


def test_voter_row_and_agreement_match_hand_computation(vote):
    votes = [
        vote("left", task="1"),
        vote("right", task="1", left="b", right="a", repeat=True),  # the same image
        vote("tie", task="2"),
        vote("left", task="2", left="b", right="a", repeat=True),
        vote("right", task="3", repeat=True),  # its first vote was taken back
    ]
    (row,) = voters(votes)
    assert (row.votes, row.ties, row.status) == (5, 1, "unknown")
    assert (row.consistency.value, row.consistency.count) == (0.5, 2)
    assert row.left.value == pytest.approx(0.5)
    assert row.by_chance == pytest.approx(0.8**2 / 2 + 0.2**2)
    votes = [
        vote("left", task="1", voter="ann"),
        vote("right", task="1", voter="bob", left="b", right="a"),
        vote("left", task="2", voter="ann"),
        vote("right", task="2", voter="bob"),
        vote("tie", task="3", voter="bob"),
        vote("left", task="3", voter="ann"),
    ]
    found = voter_agreement(votes)
    assert (found.value, found.count) == (0.5, 2)


def test_a_summary_has_all_tables(vote, tmp_path):
    log = VoteLog(tmp_path)
    for number in range(12):
        log.add(vote("left", task=str(number), left="new", right="base", scores=({"judge": 2.0}, {"judge": 1.0})))
    found = summarise([log])
    assert (found["votes"], found["pairs"], found["choices"]["left"]) == (12, 12, 12)
    text = as_text(found)
    words = ("12 votes on 12 pairs of 12 tasks", "new  against  base  1.000", "judge  all  1.000", "ann  12 votes", "Bradley-Terry")
    assert [word for word in words if word not in text] == []
