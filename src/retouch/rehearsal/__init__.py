"""Rehearsals: a recipe's step at full size on a fake accelerator, without weights and without a GPU.

What counts, models or reports such a step belongs here. It may import ``assembly``, ``training`` and every package below them, runs
their code as it is, and changes torch only while a rehearsal runs.
"""
