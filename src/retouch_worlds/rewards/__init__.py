"""The playground's exact judges: rewards that know the scene of a task and compare the pixels of an image with it.

Modules may import ``playground.world``, ``rewards.base`` and ``types``.
"""
