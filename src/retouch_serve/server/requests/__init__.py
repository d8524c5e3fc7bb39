"""Requests of the reward server.

``request_headers`` reads deadlines and ids, and ``decoding`` converts a body to samples, within ``limits`` and a memory budget over
all requests. ``single_score`` is the format of the endpoint for one image. Modules may import ``front``, the wire format in
``retouch_serve.wire`` and ``retouch.data.images``; they do not know the rewards that are served.
"""
