"""Policies of denoising chains: rollouts with stochastic transitions, and their log-probabilities with gradient.

``rollout``, ``transitions`` and ``windows`` are sections of the recipe. May import what ``policies`` may import, and no model: the
policy knows its model through ``retouch.protocols.DenoisingModel``.
"""
