"""Rehearsals: a recipe's step at full size on a fake accelerator, without weights and without a GPU.

What counts, models or reports such a step belongs here. It runs the code of ``retouch.assembly`` and ``retouch.training`` as it is,
and changes torch only while a rehearsal runs.
"""
