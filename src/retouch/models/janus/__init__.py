"""Janus-Pro (arXiv 2501.17811) as a text-to-image policy that generates image tokens: model and loading.

It may import ``models.language``, ``models.common`` and what these may import."""
