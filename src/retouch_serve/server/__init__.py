"""The reward server: ``retouch serve`` hosts rewards over HTTP, in one or more replica processes.

From the inside out:

- ``hosted_rewards`` builds the rewards, ``scoring`` calls one on a batch, ``batching`` collects the samples of all callers, and
  ``service`` admits requests.
- ``app`` and ``middleware`` are the HTTP interface; ``request_bodies`` reads requests within the limits; ``metrics`` are the
  metrics of ``GET /metrics``.
- ``replica`` is one server process, ``supervisor`` or ``ray_engine`` keeps the replicas running, and ``command`` reads the
  arguments of ``retouch serve``. ``in_process`` is ``retouch.serve``, a server in a thread of the caller's process.

The wire format is in ``retouch_serve.wire``. May import everything up to ``run``, which builds rewards.
"""
