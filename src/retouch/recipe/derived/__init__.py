"""What follows from a valid recipe: the number of judge requests, whether a run can resume with it, and which keys save memory.

It may import ``recipe`` and the sections of rewards. Nothing that reads a recipe imports it.
"""
