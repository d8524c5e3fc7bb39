"""The playground's exact judges: rewards that know the scene of a task and measure an image's pixels against it.

They may import ``playground.world``, ``rewards.base`` and ``types``.
"""
