"""Rewards that compute a score from the image in the run's own process: by pixels, or by a pretrained model.

One file a reward (or a family of them); helpers: ``dual_encoder.py`` (CLIP, SigLIP), ``detectors.py``, ``weights.py``,
``pixels.py``. May import ``rewards.base``, ``rewards.facts`` and third-party libraries, torch and transformers only inside
functions of a reward's file.
"""
