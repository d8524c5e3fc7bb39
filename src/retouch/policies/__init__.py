"""Policies: what acts and gets the gradient. ``denoising`` and ``autoregressive`` hold one each, ``engines`` samples elsewhere.

The two top-level modules are shared by both: copies of trainable weights, and value heads. A policy knows its model only through
``retouch.protocols``. May import ``core``, ``types``, ``protocols`` and ``config``.
"""
