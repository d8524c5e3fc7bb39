"""SGLang-Diffusion as an engine of denoising chains: its server samples, and the policy measures what it sampled.

``section`` is the recipe's section, ``wire`` the requests and what is checked of the responses, ``weights`` the updates of the
server's weights. May import ``policies.engines``.
"""
