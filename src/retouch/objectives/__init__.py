"""Objectives turn a trajectory and its advantages into a loss; advantages are computed from the rewards of a step.

Each class is both a section of a recipe and the computation; ``kinds.py`` lists them. A formula that others can use belongs in
``core``. Modules here may import ``core``, ``config``, ``types`` and ``protocols``, and torch only inside methods of sections.
"""
