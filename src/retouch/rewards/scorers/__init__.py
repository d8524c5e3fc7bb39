"""Rewards that score an image in the process of the run, from its pixels or with a pretrained model.

Each file contains one reward or one family of rewards. Helpers: ``dual_encoder.py`` (CLIP, SigLIP), ``detectors.py`` and
``pixels.py``. Modules may import ``rewards.base``, ``rewards.facts``, ``rewards.weights`` and third-party libraries. The file of a
reward imports torch and transformers only inside functions.
"""
