"""The wire format of reward servers, shared by the server (``retouch.serving``) and the client (``retouch.rewards.client``).

``schema`` has the JSON documents, ``packing`` turns samples into one, ``bodies`` and ``msgpack_body`` put it with the images' bytes
into a request body, ``replies`` checks a server's reply, and ``errors`` lists every error. May import ``types`` only.
"""
