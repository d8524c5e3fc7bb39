"""Reading of requests in the reward server, within limits on connections, time, bytes and memory.

``connections`` accepts and closes connections, ``request_body`` reads the body, and ``decoding`` converts it to samples, within
``limits`` and a ``memory`` budget over all requests. ``single_score`` is the format of the endpoint for one image, and ``log_rate``
bounds how often the same error is logged. Modules may import the wire format in ``retouch.rewards.wire`` and
``retouch.data.images``; they do not know the rewards that are served.
"""
