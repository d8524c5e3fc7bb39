"""Human votes on pairs of images: how they are stored, what they say, and how they train a policy.

``log`` stores votes as lines of a file, and ``judged_votes`` finds what judges gave to their images. ``shares``, ``bradley_terry``
and ``calibration`` are the statistics, and ``summary`` puts them together. ``stored_pairs`` makes pairs of a run's stored samples,
and ``asking`` chooses a voter's next pair. ``queue`` has the groups of samples that wait for voters, and ``reward`` is the reward
of kind ``votes``, which reads their votes. ``calibrated`` is the reward that maps a judge's scores to win probabilities. ``export``
writes pairs for DPO, ``simulated`` votes without people, and ``command`` is ``retouch votes``.

May import ``benchmarks`` and everything below it. No module of a reward imports numpy or torch at module level.
"""
