"""Votes as a reward: groups wait in a queue, votes become scores, and images without votes have missing scores."""

import json
import math
import threading
from contextlib import closing, contextmanager

import pytest
import torch
from PIL import Image

from retouch import cli
from retouch.data.sources.folder import FolderData
from retouch.recipe.recipe import load
from retouch.recipe.reward_arguments import parse_reward
from retouch.rewards.identity import fingerprint
from retouch.rewards.judging import CalibratedScores, RewardScorer
from retouch.rewards.ledger.database import Database, image_hash
from retouch.rewards.ledger.journal import Journal, journal_rows
from retouch.rewards.pixels import ShareReward
from retouch.rewards.several import CalibratedReward
from retouch.types import Batch, Column, Sample, Task
from retouch_view.votes.commands import Preference, SimulatedVoter, calibrate, export
from retouch_view.votes.log import Side, VoteLog, VotePair
from retouch_view.votes.queue import VoteQueue, pairs_to_compare
from retouch_view.votes.reward import VotesReward
from retouch_view.votes.statistics import judged_votes, summarise
from vote_maker import VoteMaker

SOURCE = Image.new("RGB", (8, 6), (9, 9, 9))


@pytest.fixture
def vote():
    return VoteMaker()


@pytest.fixture
def calibration(vote):
    scores = [({"share": 0.1 + k / 40}, {"share": 0.5 + k / 40}) for k in range(12)]
    votes = [vote("right", task=str(k), scores=each, left=f"l{k}") for k, each in enumerate(scores)]
    return calibrate(votes, "share", resamples=20)


def samples(*reds, task="t"):
    given = Task(task, "make it red", (SOURCE,), tags={"kind": "colour"}, meta={"n": 1})
    return [Sample(given, None if red is None else Image.new("RGB", (8, 6), (red, 100, 100))) for red in reds]


def voter(queue, **noise):
    return SimulatedVoter(queue, ShareReward(), "share", Preference(**noise))


@contextmanager
def voting(queue, **noise):
    """A voter on a thread, who stops at the end of the block."""
    stop, made = threading.Event(), voter(queue, **noise)
    thread = threading.Thread(target=made.run, kwargs={"limit": None, "stop": stop.is_set, "poll_seconds": 0.01}, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join(timeout=30)


def test_scores_follow_the_votes_within_each_group(tmp_path):
    reward = VotesReward(queue=str(tmp_path))
    with voting(tmp_path) as given:
        scores = reward([*samples(10, 200, 90), *samples(60, 50, task="u")])
    first, second = scores["preference"][:3], scores["preference"][3:]
    assert first.argsort().tolist() == [0, 2, 1]
    assert second[0] > second[1]
    assert first.mean().item() == pytest.approx(0.5)
    assert scores["voted"].tolist() == [1.0] * 5
    assert given.votes == 3 + 1


def test_scores_use_the_votes_that_arrived_before_the_time_out(tmp_path):
    queue = VoteQueue(tmp_path)
    given = samples(10, 200, 90)
    group = queue.put(given[0].task, [sample.image for sample in given], pairs=None)
    assert voter(tmp_path).answer(most=1) == 1
    scores = VotesReward(queue=str(tmp_path), wait=0.05)(given)
    compared = set(group.pairs[0])
    for index, value in enumerate(scores["preference"].tolist()):
        assert math.isnan(value) == (index not in compared)
    assert scores["voted"][0].item() == pytest.approx(1 / 3)


def test_images_that_are_not_shown_to_voters_have_missing_or_equal_scores(tmp_path):
    """Images that are alone (those of an evaluation), no image, and equal images."""
    reward = VotesReward(queue=str(tmp_path))
    assert reward(samples(10, task="a") + samples(20, task="b"))["preference"].isnan().all()
    assert reward(samples(10, 10))["preference"].isnan().all()
    assert not (tmp_path / "groups").exists()
    with voting(tmp_path) as given:
        scores = reward(samples(10, 10, 99, None))["preference"]
    assert given.votes == 1
    assert scores[0] == scores[1] < scores[2]
    assert scores[3].isnan()


def test_a_scorer_queues_all_chunks_at_once_and_waits(tmp_path):
    scorer = RewardScorer(VotesReward(queue=str(tmp_path)), {"preference": 1.0})
    futures = [scorer.submit(samples(10, 200, task=name)) for name in "abc"]
    queue = VoteQueue(tmp_path)
    for _ in range(500):
        if len(queue.open_groups()) == 3:
            break
        threading.Event().wait(0.01)
    assert [group.task for group in queue.open_groups()] == ["a", "b", "c"]
    assert not any(future.done() for future in futures)
    voter(tmp_path).answer()
    for future in futures:
        low, high = future.result(timeout=30).rewards.tolist()
        assert low < high
    scorer.close()


def test_the_future_raises_an_error_while_waiting_and_the_end_of_the_reward(tmp_path, monkeypatch):
    reward = VotesReward(queue=str(tmp_path))
    future = reward.submit(samples(10, 200))
    reward.close()
    with pytest.raises(RuntimeError, match="closed while it waited"):
        future.result(timeout=30)
    assert len(VoteQueue(tmp_path).open_groups()) == 1

    def broken(self, group):
        raise KeyError("no such image")

    monkeypatch.setattr(VoteQueue, "unanswered", broken)
    with pytest.raises(KeyError, match="no such image"):
        VotesReward(queue=str(tmp_path)).submit(samples(10, 200)).result(timeout=5)


@pytest.mark.parametrize("scores", [(math.nan, 0.5), (0.5, math.nan)])
def test_a_simulated_voter_does_not_choose_without_a_score(scores):
    for noise in (0.0, 0.5):
        with pytest.raises(ValueError, match="has no score for an image; use a column that scores every image"):
            Preference(noise=noise).choose(*scores, uniform=0.5)


@pytest.mark.parametrize("count", [2, 3, 7, 12])
def test_pairs_cover_all_images_first_and_contain_every_pair_once(count):
    found = pairs_to_compare(count, most=None, seed="s")
    assert len({frozenset(pair) for pair in found}) == len(found) == count * (count - 1) // 2
    assert {index for pair in found[: -(-count // 2)] for index in pair} == set(range(count))
    assert found == pairs_to_compare(count, most=None, seed="s")
    assert pairs_to_compare(count, most=1, seed="s") == found[:1]


def test_a_damaged_group_is_left_out(tmp_path):
    queue = VoteQueue(tmp_path)
    given = samples(10, 200)
    group = queue.put(given[0].task, [sample.image for sample in given], pairs=None)
    path = tmp_path / "groups" / group.id / "group.json"
    good = json.loads(path.read_text())
    for key, value in [
        ("images", [["../x.png", "a"], ["1.png", "b"]]),
        ("pairs", [[0, 7]]),
        ("source", "/etc/passwd"),
        ("at", None),
        ("at", 10**400),
    ]:
        path.write_text(json.dumps({**good, key: value}))
        assert VoteQueue(tmp_path).open_groups() == []
    for content in ("", "[", "[]", "null"):
        path.write_text(content)
        assert VoteQueue(tmp_path).open_groups() == []


def test_recipes_with_votes_need_another_eval_column_and_whole_groups():
    votes = {"kind": "votes", "queue": "q", "combine": {"preference": 1}}
    parts = {"votes": {"kind": "votes", "queue": "q"}, "judge": {"kind": "playground"}}
    several = {"kind": "several", "rewards": parts, "combine": {"votes/preference": 1}}
    recipe = load("playground/grpo", [f"reward={json.dumps(several)}", "eval.column=judge/overall"])
    assert recipe.reward.known_columns()["votes/preference"].high == 1
    column = r"eval\.column: votes compares the images of a task"
    chunk = r"rollout\.chunk: 40 splits groups of 12, but votes compares whole groups"
    for reward, changes, says in (
        (votes, ["eval.column=null"], column),
        (votes, ["eval.column=preference"], column),
        (several, ["eval.column=votes/preference"], column),
        (several, ["eval.column=judge/overall", "rollout.chunk=40"], chunk),
    ):
        with pytest.raises(ValueError, match=says):
            load("playground/grpo", [f"reward={json.dumps(reward)}", *changes])
    first = fingerprint(VotesReward(queue="a", pairs=3))
    assert fingerprint(VotesReward(queue="b", pairs=3, wait=1.0)) == first
    assert fingerprint(VotesReward(queue="a", pairs=4)) != first


def test_votes_are_exported_as_pairs(tmp_path, vote):
    queue = tmp_path / "queue"
    with voting(queue):
        VotesReward(queue=str(queue))([*samples(10, 200, 90), *samples(60, 50, task="u")])
    done = export([VoteLog(queue)], tmp_path / "pairs")
    assert (done.pairs, done.undecided, done.lost) == (4, 0, 0)
    rows = FolderData(path=str(tmp_path / "pairs")).rows(seed=0)
    assert len(rows) == 4
    for index in range(4):
        row = rows[index]
        assert row.instruction == "make it red"
        assert row.source in ("t", "u")
    lines = [json.loads(line) for line in (tmp_path / "pairs" / "metadata.jsonl").read_text().splitlines()]
    for line in lines:
        chosen, rejected = (Image.open(tmp_path / "pairs" / line[side]).getpixel((0, 0)) for side in ("chosen", "rejected"))
        assert chosen[0] > rejected[0]
        assert Image.open(tmp_path / "pairs" / line["image"]).getpixel((0, 0)) == (9, 9, 9)
    with pytest.raises(ValueError, match="exists"):
        export([VoteLog(queue)], tmp_path / "pairs")


def test_pairs_without_a_decision_or_without_images_in_the_run_are_not_exported(tmp_path, vote):
    queue = VoteQueue(tmp_path / "queue")
    given = samples(10, 200, 90)
    group = queue.put(given[0].task, [sample.image for sample in given], pairs=None)
    for number, choice in ((0, "left"), (0, "right"), (1, "both_bad"), (2, "left")):
        queue.log.add(group.pair(group.pairs[number]).vote(choice, voter="ann"))
    (queue.root / group.images[group.pairs[2][0]][0]).write_bytes(b"")
    SOURCE.save(tmp_path / "secret.png")
    log = VoteLog(tmp_path / "runs" / "one")
    row = vote("left").to_json()
    for side in ("left", "right"):
        row[side]["file"] = "../../secret.png"
    log.folder.mkdir(parents=True)
    log.path.write_text(json.dumps(row) + "\n")
    for each, says in ((queue.log, "2 are undecided, and 1 have missing"), (log, "1 have missing or changed images")):
        with pytest.raises(ValueError, match=says):
            export([each], tmp_path / "pairs")
    assert not (tmp_path / "pairs").exists()


def test_a_calibrated_reward_gives_win_probabilities(tmp_path, vote):
    path = tmp_path / "map.json"
    votes = [
        vote("left" if left > right else "right", task=str(k), scores=({"share": left}, {"share": right}), left=f"l{k}")
        for k, (left, right) in enumerate([(0.2, 0.4), (0.3, 0.1), (0.5, 0.3), (0.6, 0.9), (0.7, 0.2)] * 4)
    ]
    made = calibrate(votes, "share", resamples=50)
    made.save(path)
    section = {"kind": "calibrated", "of": {"kind": "share", "channel": "red"}, "column": "share", "map": str(path)}
    reward = parse_reward({**section, "combine": {"win_probability": 1}})
    assert isinstance(reward, CalibratedReward)
    built = reward.build()
    scores = built(samples(10, 250))
    assert dict(built.columns) == reward.known_columns()
    for name, place in (("win_probability", 0), ("win_probability_sd", 1)):
        assert scores[name].tolist() == pytest.approx([made.at(value)[place] for value in scores["share"].tolist()], abs=1e-6)
    assert reward.model_dump(mode="json")["of"] == {"kind": "share", "channel": "red"}
    before = fingerprint(built)
    calibrate(votes[:-1], "share", resamples=50).save(path)
    assert fingerprint(reward.build()) != before
    scored = RewardScorer(built, reward.combine)(samples(10, 250)).rewards
    assert scored[0] < scored[1]
    with pytest.raises(ValueError, match=r"maps 'share', but reward\.column is 'other'"):
        parse_reward({**section, "column": "other"}).build()
    with pytest.raises(ValueError, match="no file"):
        parse_reward({**section, "map": str(tmp_path / "none.json")}).build()
    other = {"kind": "calibrated", "of": {"kind": "playground"}, "column": "overal", "map": "m", "combine": {"win_probability": 1}}
    with pytest.raises(ValueError, match=r"reward\.column: the reward has no column 'overal'"):
        load("playground/grpo", [f"reward={json.dumps(other)}"])


def test_a_calibrated_reward_works_inside_several_and_its_scores_are_checked_before_they_are_mapped(tmp_path, calibration):
    path = tmp_path / "map.json"
    calibration.save(path)
    red = {"kind": "calibrated", "of": {"kind": "share", "channel": "red"}, "column": "share", "map": str(path)}
    parts = {"red": red, "green": {"kind": "share", "channel": "green"}}
    several = {"kind": "several", "rewards": parts, "combine": {"red/win_probability": 1, "green/share": 0.5}}
    reward = parse_reward(several)
    assert reward.model_dump(mode="json")["rewards"]["red"] == red
    assert parse_reward({"kind": "several", **reward.model_dump(mode="json")}) == reward
    scores = reward.build()(samples(10, 250))
    assert scores.keys() == (reward.known_columns() or {}).keys()
    expected = [calibration.at(value)[0] for value in scores["red/share"].tolist()]
    assert scores["red/win_probability"].tolist() == pytest.approx(expected, abs=1e-6)
    for key, value, words in (
        ("column", "shade", r"reward\.rewards\.red\.column: the reward has no column 'shade'"),
        ("combine", {"share": 1}, r"reward\.rewards\.red: combine and max_missing belong to all rewards together"),
    ):
        faulty = {**several, "rewards": {**parts, "red": {**red, key: value}}}
        with pytest.raises(ValueError, match=words):
            load("playground/grpo", [f"reward={json.dumps(faulty)}"])

    class Listed:
        columns = {"share": Column(0.0, 1.0)}  # noqa: RUF012
        name = "share"

        def __call__(self, given):
            return {self.name: [0.25] * len(given)}

    class Misnamed(Listed):
        name = "shares"

    scores = CalibratedScores(Listed(), "share", calibration)(samples(10, 250))
    assert scores["win_probability"].tolist() == pytest.approx([calibration.at(0.25)[0]] * 2)
    with pytest.raises(ValueError, match=r"Misnamed.*declares the column 'share' but did not return it; it returned shares"):
        CalibratedScores(Misnamed(), "share", calibration)(samples(10, 250))


def test_votes_are_joined_with_the_judge_scores_of_the_ledger(tmp_path):
    queue = tmp_path / "run" / "queue"
    given = samples(10, 200, 90)
    with voting(queue):
        VotesReward(queue=str(queue))(given)
    with closing(Database(tmp_path / "run" / "ledger.sqlite")) as database:
        batch = Batch(seed=0, step=0, tasks=(given[0].task,), group_ids=(0,), group=(0, 0, 0), slot=(0, 1, 2))
        scores = {"judge": torch.tensor([0.1, 0.9, math.nan]), "votes/preference": torch.tensor([0.0, 1.0, 0.5])}
        Journal(database).record(journal_rows(batch, given, split="train", step=0), scores)
    votes = judged_votes([VoteLog(queue)])
    found = sorted(str(dict(side.scores)) for vote in votes for side in (vote.left, vote.right))
    assert found == [*["{'judge': 0.10000000149011612}"] * 2, *["{'judge': 0.8999999761581421}"] * 2, *["{}"] * 2]
    (agreement,) = [row for row in summarise([VoteLog(queue)])["judges"] if row["category"] == "all"]
    assert (agreement["column"], agreement["share"]["value"], agreement["share"]["count"]) == ("judge", 1.0, 1)


def test_an_image_of_two_tasks_gets_the_score_of_the_task_of_the_vote(tmp_path):
    unchanged, red = (Image.new("RGB", (8, 8), colour) for colour in ("white", "red"))
    tasks = tuple(Task(name, "") for name in ("keep the photo", "make it red"))
    given = [Sample(task, image) for task in tasks for image in (unchanged, red)]
    with closing(Database(tmp_path / "ledger.sqlite")) as database:
        batch = Batch(seed=0, step=0, tasks=tasks, group_ids=(0, 1), group=(0, 0, 1, 1), slot=(0, 1, 0, 1))
        rows = journal_rows(batch, given, split="train", step=0)
        Journal(database).record(rows, {"judge": torch.tensor([1.0, 0.25, 0.0, 0.75])})
    log = VoteLog(tmp_path / "queue")
    for task in tasks:
        first, second = (Side(arm="", image=image_hash(image), file="") for image in (unchanged, red))
        log.add(VotePair(task=task.id, instruction="", first=first, second=second).vote("right", voter="me"))
    votes = judged_votes([log])
    assert [[side.scores["judge"] for side in (vote.left, vote.right)] for vote in votes] == [[1.0, 0.25], [0.0, 0.75]]


def test_votes_command_simulates_summarises_exports_and_reports_errors(tmp_path, capsys):
    def said(folder, *words, code=0):
        assert cli.main(["votes", str(tmp_path / folder), *words]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    queue = VoteQueue(tmp_path / "queue")
    for number in range(12):
        given = samples(10 + number, 200 - number, task=str(number))
        queue.put(given[0].task, [sample.image for sample in given], pairs=None)
    assert "12 votes in" in said("", "simulate", "share:red", "--column", "share", "--limit", "12")
    assert "12 votes on 12 pairs of 12 tasks" in said("")
    assert json.loads(said("", "--json"))["choices"]["left"] >= 0
    assert "12 pairs in" in said("", "export", "--to", str(tmp_path / "pairs"))
    assert "0 tasks have votes" in said("", "calibrate", "share", "--to", str(tmp_path / "map.json"), code=2)
    assert "no votes.jsonl" in said("none", code=2)
