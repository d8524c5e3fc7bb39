"""Builds the parts of a run from its recipe: data, model, policy, weight copies, value head, reward, phases, and their state for
checkpoints.

Code that builds an object of a run from a section of the recipe belongs here. It may import ``training`` and every package below
it; it starts no run (see ``session``).
"""
