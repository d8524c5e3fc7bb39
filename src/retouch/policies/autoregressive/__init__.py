"""The policy that writes tokens: sampling of completions, and their log-probabilities with gradient.

``rollout`` has the recipe's section and the table of engines; ``decoding`` is the engine that uses the policy's own model, and
other engines are in ``retouch_serve.engines``. May import what ``policies`` may import, and no model: the policy knows its model
through ``retouch.protocols.AutoregressiveModel``.
"""
