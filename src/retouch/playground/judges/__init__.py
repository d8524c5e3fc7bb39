"""The playground's exact judges: rewards that know the scene of a task and measure an image's pixels against it.

Each is a reward of the table in ``retouch.rewards.kinds``. They import the playground's world, ``rewards.base`` and types.
"""
