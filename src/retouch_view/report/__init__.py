"""The HTML report of a run, one self-contained file with curves, tables and images; and the comparison of runs in a terminal.

It reads the run's folder through ``records`` and may also import ``types``, ``core``, the text measures of ``rewards`` and
``leaves`` of ``recipe``. It never changes the run.
"""
