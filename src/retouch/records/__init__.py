"""What a run writes to disk and how it is read back: the run folder, crash-safe files, the summary, metric trackers.

It may import ``types`` and ``core`` only. It knows file formats, but not what the numbers mean.
"""
