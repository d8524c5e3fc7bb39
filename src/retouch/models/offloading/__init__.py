"""Frozen parts of an image model that need not stay on its device: offloading to CPU memory, and prompt embeddings kept on disk.

It may import ``models.base``, ``models.common`` and what these may import, and no family.
"""
