"""The choice of the next pair for a voter."""

from itertools import pairwise

from retouch_view.votes.log import Side, Vote, VotePair, Votes
from retouch_view.votes.queue import REPEAT_EVERY, next_pair


def pair(task: str) -> VotePair:
    first, second = (Side(arm="", image=f"{task}/{name}", file=f"{task}/{name}.png") for name in "ab")
    return VotePair(task=task, instruction="make it red", first=first, second=second)


def votes_of(given: list[Vote]) -> Votes:
    return Votes(tuple(given), {vote.pair: (vote,) for vote in given})


def test_a_queue_repeats_a_pair_that_is_still_open() -> None:
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


def test_a_queue_does_not_repeat_pairs_one_after_the_other() -> None:
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
