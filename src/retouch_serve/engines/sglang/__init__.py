"""SGLang-Diffusion as an engine of denoising chains: its server samples chains, and the policy computes their log-probabilities.

``section`` is the recipe section, ``wire`` the requests and the validation of responses, ``weights`` the updates of the server's
weights. May import ``policies.engines``.
"""
