"""The training loop and what it needs: evaluation, preflight checks, checkpoints, the recorder and the ledger of scores.

It may import ``policies``, ``objectives``, ``rewards``, ``records``, ``distributed`` and ``core``; it knows no recipe, and
``assembly`` builds its parts.
"""
