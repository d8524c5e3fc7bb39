"""Policies of denoising chains: rollouts with stochastic transitions, and their log-probabilities with gradient.

``rollout``, ``transitions`` and ``windows`` are the recipe's sections. May import ``core``, ``types``, ``protocols`` and
``config``, and no model: the policy knows its model through ``retouch.protocols.DenoisingModel``.
"""
