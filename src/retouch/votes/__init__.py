"""Statistics of human votes on pairs of images, and preference data made from the votes.

``judged_votes`` adds the scores of judges to the images of votes. ``shares`` has the statistics of shares, and ``summary`` collects
all statistics. ``stored_pairs`` makes pairs of the stored samples of runs, and ``asking`` chooses the next pair of a voter.
``export`` writes pairs for DPO, ``simulated`` has simulated voters, and ``command`` is ``retouch votes``. The log of votes, and the
rewards that are computed from votes, are in ``rewards.votes``.

May import ``benchmarks`` and everything below it. numpy and torch are imported only where they are needed.
"""
