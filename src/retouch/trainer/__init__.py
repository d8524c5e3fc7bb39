"""``retouch.Trainer``: runs from Python, with the objects that a script already has.

Turns objects (pipelines, functions, data sets) into a recipe and runs it with ``retouch.run``. It may import every package but
``cli``; no other package imports it.
"""
