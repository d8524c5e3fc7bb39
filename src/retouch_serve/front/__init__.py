"""The front of both HTTP servers, the reward server and ``retouch view``: limits that hold before a request is authenticated.

``connections`` limits connections, headers and unread replies, ``bodies`` the time, size and memory of bodies, ``memory`` the bytes
that all requests hold together, and ``log_rate`` what requests can write to a log.

May import ``rewards.wire``.
"""
