"""Renderers: frozen models that turn what a policy generated (latents, responses, prompts, image tokens) into images.

``base`` has the recipe's section from which all kinds derive, and ``kinds`` has the table of kinds; each kind is one class in its
own file. A renderer may import ``models`` (the sections, and model classes inside methods), ``core``, ``types``, ``protocols`` and
``config``; it knows no policy, only the completions in a trajectory. The modules of sections import no torch.
"""
