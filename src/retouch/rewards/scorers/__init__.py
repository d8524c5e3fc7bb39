"""Rewards that score an image in the process of the run, from its pixels or with a pretrained model.

The file of a reward imports torch and transformers only inside functions, ``networks.py``, which has the models, at the top.
"""
