"""``retouch view``: a local web page that follows the runs in a folder.

It only reads the files that a run writes, so the trainer never waits for it and never knows about it. ``tail`` follows a file of
JSON lines, ``live_run`` reads one run's folder again and again, ``catalogue`` finds the runs of a folder and the files that may be
served, ``thumbnails`` makes small images, ``gate`` checks who asks, ``app`` has the endpoints, and ``command`` starts the server.
The page is in ``static``: plain JavaScript modules and no library, so nothing is built and nothing is loaded from other sites.

May import ``records`` and everything below it.
"""
