"""What a person looks at: the live page, the report, votes on pairs of images, and ``retouch ledger``.

May import ``retouch``, ``retouch_worlds`` and, for the limits of its server, ``retouch_serve``.
"""
