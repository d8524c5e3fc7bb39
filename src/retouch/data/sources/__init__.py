"""Data sources that read stored data: one module per kind, with the section of the recipe and the code that reads the data.

Sources import the rest of ``retouch.data`` and, of each other, only ``folder`` (paths inside a folder), ``hub`` and ``features``.
"""
