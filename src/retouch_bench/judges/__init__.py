"""``retouch judge audit``: measures a judge on images of known quality, before a run or a benchmark pays for it.

``ladders`` makes the images, ``own_ladders`` reads images of the user, and ``variants`` changes images. ``asking`` has them scored
through the ledger; ``measures`` and ``findings`` compute the result; ``audit`` is the entry point; ``page`` writes the HTML page.
``short_audit`` runs before every benchmark. May import what ``benchmarks`` may import, and from ``benchmarks`` only
``statistics``.
"""
