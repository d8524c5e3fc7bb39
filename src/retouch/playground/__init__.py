"""The built-in world of small images in which every recipe has a twin, and the packaged weights of its models.

Its tasks are in ``data.playground``, its exact judges in ``rewards.playground`` and its models in ``models.playground``; the models
are trained in ``pretraining``. It may import ``types``, ``config`` and ``core``.
"""
