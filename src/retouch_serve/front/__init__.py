"""The front of both HTTP servers, the reward server and ``retouch view``: limits that hold before a request is authenticated.

``connections`` limits connections, headers, unread replies and what requests can write to a log, and ``bodies`` the time and size
of bodies and the memory of all of them. May import ``wire``.
"""
