"""Frozen parts of an image model that need not stay on its device: offloading to CPU memory, and a disk cache of prompt embeddings.

It may import ``models.base``, ``models.common`` and what these may import, and no family.
"""
