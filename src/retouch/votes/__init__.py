"""What human votes on pairs of images say, and pairs made of them.

``judged_votes`` finds what judges gave to the images. ``shares`` has the statistics of shares, and ``summary`` puts all statistics
together. ``stored_pairs`` makes pairs of a run's stored samples, and ``asking`` chooses a voter's next pair. ``export`` writes
pairs for DPO, ``simulated`` votes without people, and ``command`` is ``retouch votes``. The votes themselves, and the rewards that
they give, are in ``rewards.votes``.

May import ``benchmarks`` and everything below it. numpy and torch are imported only where they are needed.
"""
