"""The tasks of the playground: data sources that generate scenes, edits and words from a seed instead of reading files.

The modules import ``playground.world`` and the rest of ``retouch.data``, and import torch only when tasks are made.
"""
