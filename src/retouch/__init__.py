"""Reinforcement-learning post-training for image editing and generation."""

__version__ = "0.1.0"
