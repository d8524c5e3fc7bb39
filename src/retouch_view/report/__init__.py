"""The HTML report of a run, one self-contained file, and the comparison of runs in a terminal. It never changes the run.

Modules here may import the core, ``retouch_worlds``, ``retouch_judge`` and ``retouch_serve``.
"""
