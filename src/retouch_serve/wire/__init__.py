"""The wire format of reward servers, shared by the server (``retouch_serve.server``) and the client (``retouch_serve.client``).

``schema`` defines the JSON documents, ``packing`` turns samples into a batch document, ``bodies`` encodes the document and the
bytes of its images as a request body, ``replies`` checks the reply of a server, and ``errors`` lists all errors and recognises the
addresses of this machine. May import ``types`` only.
"""
