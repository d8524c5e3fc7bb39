"""The client of reward servers: a reward that sends samples over HTTP to one or more servers.

``pool`` chooses the server of a request, without I/O; ``transport`` makes one HTTP exchange;
``discovery`` reads which rewards the servers host; ``session`` scores one chunk of samples, with retries; ``client`` is the reward.
May import ``rewards/wire``, ``rewards/quota`` and
``rewards/ledger/answers.py``.
"""
