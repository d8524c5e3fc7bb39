"""The schema of a recipe: the top-level sections, Jsonnet and ``--set``, and the checks that concern several sections.

A section that belongs to a single part (a model, a reward, an objective) is defined next to that part instead. This package may
import the sections of ``models``, ``policies``, ``renderers``, ``rewards``, ``objectives`` and ``data``, and ``config`` and
``records``. Reading a recipe imports no torch unless the recipe names a class that does.
"""
