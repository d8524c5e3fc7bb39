"""The client of reward servers: a reward that sends samples over HTTP to one or more servers.

``session`` chooses a server and scores one chunk of samples, with retries; ``transport`` makes one HTTP exchange; ``discovery``
reads which rewards the servers host; ``remote`` is the section of the reward, and ``client`` the reward. May import ``wire``, and
of the core ``rewards/quota`` and ``rewards/ledger``.
"""
