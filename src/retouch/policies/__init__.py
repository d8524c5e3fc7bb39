"""Policies: the models that sample and are trained. ``denoising`` and ``autoregressive`` contain one policy each; ``engines``
sample outside the trained model.

Both policies share the top-level modules: copies of trainable weights, value heads, and the common keys and arguments
(``context``). A policy knows its model only through ``retouch.protocols``. May import ``core``, ``types``, ``protocols`` and
``config``, and from ``models`` only what all models share (``base``, ``train``, ``common``).
"""
