"""The ledger: one SQLite file for each rank of a run, with every score of the run and every answer of a judge or a reward server.

``database`` opens the file; ``journal`` keeps the scores of samples by their place in the run, for resuming; ``answers`` and
``caching`` keep the answers of judges and servers by the content that they judged, so that nothing is paid for twice. May import
``core``, ``types``, ``protocols``, ``rewards/vlm`` and ``rewards/judges``; a training run opens it in ``training/ledger.py``.
"""
