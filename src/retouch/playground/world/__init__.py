"""The playground's world: scenes of coloured shapes, edits of them in words, and signs with words, all generated from a seed.

Modules here import ``types``, ``config`` and ``core``, and torch only when something is drawn.
"""
