"""Choose the next pair of a voter, and the side of each image: pseudo-random, as a function of the voter and of the votes so far.

So a page that is reloaded asks the same question again, and the pair of a vote that was taken back is asked again.
"""

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass

from retouch_view.votes.log import Vote, VotePair, Votes

REPEAT_EVERY = 8
"""Number of new pairs for each hidden repeat."""
_LEAST_BETWEEN = 3
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class NextPair:
    """The next pair of a voter. ``exchanged``: the second image is on the left. ``repeat``: the voter has answered this pair
    before, with exchanged sides."""

    pair: VotePair
    exchanged: bool
    repeat: bool


def next_pair(pairs: Sequence[VotePair], votes: Votes, voter: str, *, shared: bool) -> NextPair | None:
    """The next pair for a voter; None if none is left.

    ``shared``: one vote of any voter on a pair is enough, and a voter gets one of the first pairs without a vote, as in a queue.
    Otherwise each voter sees all pairs, in a different order for each voter. After ``REPEAT_EVERY`` pairs, an earlier pair is asked
    again with its sides exchanged, so that a voter who always chooses the same side contradicts the first answer.
    """
    known = {pair.id: pair for pair in pairs}
    own = [vote for vote in votes.votes if vote.voter == voter]
    here = [vote for vote in own if vote.pair in known]
    answered = votes.by_pair if shared else {vote.pair: (vote,) for vote in here}
    left = [pair for identity, pair in known.items() if not answered.get(identity)]
    if not left:
        return None
    again = _repeat(own if shared else here, known)
    if again is not None:
        pair = known[again.pair]
        return NextPair(pair, exchanged=again.left.image == pair.first.image, repeat=True)
    ahead = left[:_AHEAD] if shared else left  # so that the voters of a queue do not all get the same pair
    chosen = min(ahead, key=lambda pair: _draw(voter, pair.id, "order"))
    return NextPair(chosen, exchanged=_draw(voter, chosen.id, "side")[0] % 2 == 1, repeat=False)


def _repeat(votes: Sequence[Vote], known: Container[str]) -> Vote | None:
    """The vote on the pair of ``known`` that is to be repeated; None if no repeat is due."""
    repeats = {vote.pair for vote in votes if vote.repeat}
    first = [vote for vote in votes if not vote.repeat]
    # Counted from the last repeat: in a queue, repeats that were due while no earlier pair was open must not follow each other.
    since = next((number for number, vote in enumerate(reversed(votes)) if vote.repeat), len(votes))
    if since < REPEAT_EVERY:
        return None
    recent = {vote.pair for vote in votes[-_LEAST_BETWEEN:]}
    waiting = [vote for vote in first if vote.pair in known and vote.pair not in repeats and vote.pair not in recent]
    return min(waiting, key=lambda vote: _draw(vote.voter, vote.pair, "repeat")) if waiting else None


def _draw(voter: str, pair: str, purpose: str) -> bytes:
    return hashlib.sha256(f"{purpose}\n{pair}\n{voter}".encode(errors="surrogatepass")).digest()
