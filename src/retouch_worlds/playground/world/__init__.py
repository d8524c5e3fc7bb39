"""The playground's world: scenes of coloured shapes, edits of scenes and their instructions, and signs with words, all generated
from a seed.

Modules here import ``types``, ``config`` and ``core``, and torch only when random numbers are drawn.
"""
