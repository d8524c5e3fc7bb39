"""The client of reward servers: a reward whose samples are scored over HTTP by one or more servers.

``overload`` and ``pool`` decide which server to ask and when, without I/O; ``transport`` makes one HTTP exchange; ``discovery``
reads what the servers host; ``session`` gets one request scored, with retries; ``client`` is the reward. ``event_loop`` and
``line`` also serve the clients of judges in ``rewards/vlm``. May import ``rewards/wire``, ``rewards/quota`` and
``rewards/ledger/answers.py``.
"""
