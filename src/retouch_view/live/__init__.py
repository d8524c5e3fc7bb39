"""``retouch view``: a local web page that follows the runs in a folder.

It reads the files that a run writes, so the trainer never waits for it. ``tail`` follows a file of JSON lines, ``live_run`` reads
the folder of one run repeatedly, ``catalogue`` finds the runs in a folder and the files that may be served, ``judged`` reads the
answers of judges from a ledger, ``thumbnails`` makes small images, ``gate`` authenticates requests, ``bodies`` reads request
bodies, ``app`` defines the endpoints, and ``command`` starts the server. With the matching options, ``voting`` records votes,
``control`` records requests to runs, and ``trying`` lets ``trial_worker`` generate images. The page is in ``static``: plain
JavaScript modules without a library, so nothing is built and nothing is loaded from other sites.

May import ``session`` and everything below it.
"""
