"""The reward server: ``retouch serve`` hosts rewards over HTTP, in one or more replica processes.

From the inside out: ``hosted_rewards`` builds the rewards, ``scoring`` calls one on a batch, ``batching`` collects the samples of
all callers, ``service`` admits requests, ``app`` and ``middleware`` are the HTTP interface, ``replica`` is one process,
``supervisor`` or ``ray_engine`` keeps the replicas running, and ``command`` reads the arguments. The wire format is in
``retouch.rewards.wire``. May import everything up to ``assembly``, which builds rewards.
"""
