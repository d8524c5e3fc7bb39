"""``retouch judge audit``: scores images whose quality is known, to measure a judge before a run or a benchmark pays for it.

``ladders`` makes the images, ``own_ladders`` reads those of a user, ``variants`` changes images. ``asking`` gets them scored
through the ledger; ``measures`` and ``findings`` compute the result; ``audit`` is the entry, and ``page`` writes the HTML page.
``short_audit`` is what every benchmark does first. May import what ``benchmarks`` may, and of ``benchmarks`` only ``statistics``.
"""
