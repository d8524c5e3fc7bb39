"""Human votes on pairs of images: their log, the pairs to vote on, the reward of kind ``votes``, and statistics.

Modules here may import the core, ``retouch_worlds``, ``retouch_judge`` and ``retouch_serve``.
"""
