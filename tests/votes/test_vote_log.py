"""The log of votes, which survives crashes, other writers and hostile text, and the choice of the next pair for a voter."""

import json
import threading
from itertools import pairwise

import pytest

from retouch_view.votes.log import Side, VoteLog, VotePair, Votes, logs_of, pair_id, voter_name
from retouch_view.votes.queue import REPEAT_EVERY, next_pair
from vote_maker import VoteMaker


@pytest.fixture
def vote():
    return VoteMaker()


def test_votes_are_read_back_in_order_and_hostile_text_stays_in_its_line(tmp_path, vote):
    hostile = "</script><b>\u202egnp\n\r\t\0\u2028'\"{}[]\\ud800 " + "x" * 1_000_000
    log = VoteLog(tmp_path / "run")
    given = [
        vote("left", scores=({"score": 0.25}, {"score": 1.0}), tags={"kind": "add"}, source="s.png"),
        vote("both_bad", repeat=True, text="a word", mask="m.png"),
        vote("left", instruction=hostile, task=hostile),
    ]
    for each in given:
        log.add(each)
    assert log.read().votes == tuple(given)
    assert VoteLog(tmp_path / "run").read() == log.read()
    assert json.loads(log.path.read_text().splitlines()[0])["pair"] == given[0].pair
    assert log.path.read_bytes().count(b"\n") == 3
    log.add(vote("right", voter="\ud800"))
    log.add(vote("left", scores=({"a": float("nan"), "b": 1.0}, {"a": 2.0})))
    log.add(vote("right", scores=({"a": 10**400, "b": 3}, {"a": 2.0})))
    assert [each.choice for each in log.read().votes[3:]] == ["right", "left", "right"]
    kept = [(dict(each.left.scores), dict(each.right.scores)) for each in log.read().votes[4:]]  # only finite numbers
    assert kept == [({"b": 1.0}, {"a": 2.0}), ({"b": 3.0}, {"a": 2.0})]
    assert voter_name("  Ann \u202e\0 Lee\n") == "Ann Lee"
    for name in ("", " \n", "\u202e", "x" * 65):
        with pytest.raises(ValueError, match="1 to 64 characters"):
            voter_name(name)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="--vote"):
        logs_of(tmp_path / "other")


def test_a_pair_is_the_same_with_its_sides_exchanged(vote):
    assert vote("left").pair == vote("tie", left="b", right="a").pair == pair_id("t", "t/b", "t/a")
    assert vote("left").pair != vote("left", task="u").pair
    assert [vote(choice).left_points for choice in ("left", "right", "tie", "both_bad")] == [1.0, 0.0, 0.5, 0.5]


def test_only_the_same_voter_can_undo_a_vote(tmp_path, vote):
    log = VoteLog(tmp_path)
    first, second = vote("left"), vote("right")
    log.add(first)
    log.add(second)
    log.undo(first.id, voter="bob")
    assert log.read().votes == (first, second)
    log.undo(first.id, voter="ann")
    found = log.read()
    assert (found.votes, found.undone, found.by_pair[second.pair]) == ((second,), 1, (second,))
    assert len(log.path.read_text().splitlines()) == 4


def test_a_line_that_a_crash_cut_off_is_not_joined_with_the_next(tmp_path, vote):
    log = VoteLog(tmp_path)
    log.add(vote("left"))
    with log.path.open("ab") as file:
        file.write(log.path.read_bytes()[:70])
    assert (len(log.read().votes), log.read().damaged) == (1, 0)
    log.add(vote("right"))
    found = log.read()
    assert ([each.choice for each in found.votes], found.damaged) == (["left", "right"], 1)
    assert VoteLog(tmp_path).read() == found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("choice", "leftish"),
        ("choice", ["left"]),
        ("voter", 3),
        ("id", None),
        ("at", "noon"),
        pytest.param("at", 10**400, id="at-a-number-too-large"),
        ("tags", {"a": 1}),
        ("left", {"arm": "a"}),
        ("right", None),
        ("source", 1),
    ],
    ids=str,
)
def test_a_line_that_is_no_vote_is_counted_and_left_out(tmp_path, vote, key, value):
    log = VoteLog(tmp_path)
    log.path.write_text(json.dumps({**vote("left").to_json(), key: value}) + "\n" + "[" * 100_000 + "\n\xff\n3\n")
    log.add(vote("tie"))
    found = log.read()
    assert ([each.choice for each in found.votes], found.damaged) == (["tie"], 4)


def test_concurrent_writers_lose_no_votes(tmp_path, vote):
    votes = [[vote("left", task=f"{writer}/{number}") for number in range(40)] for writer in range(4)]

    def write(own):
        log = VoteLog(tmp_path)
        for each in own:
            log.add(each)

    reader = VoteLog(tmp_path)
    threads = [threading.Thread(target=write, args=(own,), daemon=True) for own in votes]
    for thread in threads:
        thread.start()
    seen = [len(reader.read().votes) for _ in range(50)]
    for thread in threads:
        thread.join(timeout=60)
    found = reader.read()
    assert seen == sorted(seen)
    assert (len(found.votes), found.damaged) == (160, 0)
    assert {each.id for each in found.votes} == {each.id for own in votes for each in own}


def test_a_file_that_was_replaced_is_read_again(tmp_path, vote):
    log = VoteLog(tmp_path)
    log.add(vote("left"))
    log.add(vote("left"))
    assert len(log.read().votes) == 2
    log.path.unlink()
    assert log.read().votes == ()
    log.add(vote("right"))
    assert [each.choice for each in log.read().votes] == ["right"]


def pair(task):
    first, second = (Side(arm="", image=f"{task}/{name}", file=f"{task}/{name}.png") for name in "ab")
    return VotePair(task=task, instruction="make it red", first=first, second=second)


def votes_of(given):
    return Votes(tuple(given), {vote.pair: (vote,) for vote in given})


def test_a_queue_repeats_a_pair_that_is_still_open():
    """This holds whichever of the other pairs are in groups that the run has closed."""
    answered = [pair(str(number)) for number in range(REPEAT_EVERY)]
    votes = votes_of([each.vote("left", voter="ann") for each in answered])
    for still_open in answered[:-3]:  # the last three were answered too recently
        found = next_pair([still_open, pair("new")], votes, "ann", shared=True)
        assert found is not None
        assert (found.pair, found.repeat, found.exchanged) == (still_open, True, True)
    closed = next_pair([pair("new")], votes, "ann", shared=True)
    assert closed is not None
    assert (closed.pair, closed.repeat) == (pair("new"), False)


def test_a_queue_does_not_repeat_pairs_one_after_the_other():
    """Also after many groups that were closed before a pair of them could be repeated."""
    given = [pair(f"closed {number}").vote("left", voter="ann") for number in range(10 * REPEAT_EVERY)]
    waiting = [pair(f"open {number}") for number in range(3 * REPEAT_EVERY)]
    repeats: list[bool] = []
    while (found := next_pair(waiting, votes_of(given), "ann", shared=True)) is not None:
        given.append(found.pair.vote("left", voter="ann", exchanged=found.exchanged, repeat=found.repeat))
        repeats.append(found.repeat)
    places = [number for number, repeat in enumerate(repeats) if repeat]
    assert len(places) == 3
    assert all(other - one > REPEAT_EVERY for one, other in pairwise(places))
