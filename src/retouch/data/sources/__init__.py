"""Data sources that read files: one module a kind, each with the section of the recipe and what reads it.

Sources import the rest of ``retouch.data`` and, of each other, only ``folder`` (paths inside a folder), ``hub`` and ``features``.
"""
