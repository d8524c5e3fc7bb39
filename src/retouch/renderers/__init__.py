"""Renderers: the frozen way from what a policy generated (latents, responses, prompts, image tokens) to images.

``base`` is the recipe's section that all kinds derive from and the table of kinds; each kind is one class in its own file. A
renderer may import ``models`` (the sections, and adapters inside methods), ``core``, ``types``, ``protocols`` and ``config``; it
knows no policy, only the completions in a trajectory. The modules of sections import no torch.
"""
