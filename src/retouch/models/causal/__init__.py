"""Decoder-only language models: one forward pass or step-by-step decoding, KV caches, and the grammar of text completions.

Code that several families of language models share belongs here. It may import ``core``, ``types``, ``protocols`` and
``models.common``, and no family.
"""
