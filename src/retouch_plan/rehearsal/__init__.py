"""Rehearsals: they execute a recipe's step at full size on a fake accelerator, without weights and without a GPU.

Code that counts, models or reports such a step belongs here. It may import ``run`` and every package below it,
runs their code unchanged, and patches torch only while a rehearsal runs.
"""
