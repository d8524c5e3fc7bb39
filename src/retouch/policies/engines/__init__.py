"""Engines that generate completions outside the trained model: a vLLM server.

``vllm`` is the recipe's section, ``plugin`` and ``grammar`` also run inside the server. May import ``policies.autoregressive`` and
what that may import; ``grammar`` and ``plugin`` import torch alone, since the server's environment has nothing else of ours.
"""
