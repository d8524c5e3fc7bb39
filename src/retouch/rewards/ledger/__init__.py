"""The ledger: one SQLite file for each rank of a run, with each score of the run and each answer of a judge or a reward server.

``database`` opens the file. ``journal`` stores the scores of samples by their position in the run, for resuming. ``answers`` and
``caching`` store the answers of judges and servers by the content that was judged, so that nothing is paid for twice. May import
``core``, ``types``, ``protocols``, ``rewards/vlm`` and ``rewards/judges``; a training run opens it in ``run/ledger.py``.
"""
