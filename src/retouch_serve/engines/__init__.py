"""Engines that sample outside the trained model: a vLLM server for completions, and an SGLang server for denoising chains.

``sections`` has their recipe sections; ``plugin`` and ``grammar`` also run inside the vLLM server. May import
``policies.autoregressive`` and what that may import. ``grammar`` imports only torch, and ``plugin`` only torch, vLLM and
``grammar``, because the server's environment has no other dependencies of Retouch.
"""
