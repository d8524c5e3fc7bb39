"""The ledger: one SQLite file for each rank of a run, with each score of the run and each answer of a judge or a reward server.

``database`` opens the file. ``journal`` stores the scores of samples by their position in the run, for resuming. The cache of
answers is in ``retouch_judge/cache.py``; a training run opens the ledger in ``run/ledger.py``.

Modules here may import ``records``, ``types`` and one another.
"""
