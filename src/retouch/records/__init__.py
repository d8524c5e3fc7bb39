"""Writes the records of a run to disk and reads them back: the run folder, crash-safe files, the summary, metric trackers.

It may import only ``types`` and ``core``. It knows file formats, but not what the numbers mean.
"""
