"""The HTML report of a run: one self-contained file with curves, tables and images.

It reads the run's folder through ``records`` and may also import ``types``, ``core`` and the text measures of ``rewards``. It never
changes the run.
"""
