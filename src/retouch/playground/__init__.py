"""The playground: a built-in world of small images, for the twins of the full-size recipes, and the packaged weights of its models.

The tasks of the playground are in ``data.playground``, its exact judges in ``rewards.playground`` and its models in
``models.playground``; the models are trained in ``pretraining``. This package may import ``types``, ``config`` and ``core``.
"""
