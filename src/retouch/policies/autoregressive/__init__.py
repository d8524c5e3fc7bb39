"""Policies of tokens: sampling completions, and their log-probabilities with gradient.

``rollout`` is the recipe's section and the interface of engines; ``decoding`` is the engine inside the model itself, and other
engines are in ``retouch.policies.engines``. May import ``core``, ``types``, ``protocols`` and ``config``, and no model: the
policy knows its model through ``retouch.protocols.AutoregressiveModel``.
"""
