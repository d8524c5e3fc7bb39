"""The playground's data: scenes of coloured shapes, edits of them in words, and signs with words, all generated from a seed.

Each ``*Data`` class is a data source of a recipe. Modules here import ``types``, ``config``, ``core`` and ``retouch.data``, and
torch only when tasks are made.
"""
