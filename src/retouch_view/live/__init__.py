"""``retouch view``: a local web page that follows the runs in a folder.

It reads the files that a run writes, so the trainer never waits for it. The page is in ``static``: plain JavaScript modules without
a library, so nothing is built and nothing is loaded from other sites.

Modules here may import the core, ``retouch_worlds``, ``retouch_judge`` and ``retouch_serve``.
"""
