"""The built-in world of small images in which every recipe has a twin: scenes, edits, instructions, tasks and exact judges, and the
models that are shipped for it.

The models are trained in ``pretraining``. It may import ``models``, ``data``, ``rewards.base``, ``core``, ``config``, ``types`` and
``protocols``; reading a recipe imports no torch from here.
"""
