"""How the reward server reads a request, within limits on connections, time, bytes and memory.

``connections`` accepts and closes connections, ``request_body`` reads the body, and ``decoding`` turns it into samples within
``limits`` and a ``memory`` budget over all requests. ``single_score`` is the body of the endpoint for one image, and ``log_rate``
bounds how often the same error is logged. May import the wire format in ``retouch.rewards.wire`` and ``retouch.data.images``;
knows nothing of the rewards that are served.
"""
