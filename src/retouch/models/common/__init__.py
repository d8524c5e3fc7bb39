"""Code that several model families share: latents, text encoding, schedules, LoRA, chat templates and loading of
weights.

Code of a single family belongs in its own folder. It may import ``core``, ``types`` and ``protocols``, and no family.
"""
