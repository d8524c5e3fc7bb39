"""Engines that sample outside the trained model: a vLLM server for completions, and in ``sglang`` one for denoising chains.

``vllm`` is the recipe's section of the first, ``plugin`` and ``grammar`` also run inside the server. May import
``policies.autoregressive`` and what that may import; ``grammar`` and ``plugin`` import torch alone, since the server's environment
has nothing else of ours.
"""
