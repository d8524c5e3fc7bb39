"""The playground's small models: classes of Qwen-Image, Qwen-VL, FLUX.1 and Emu3 with few parameters, and how each is trained.

It may import ``models``, ``playground.world``, ``core`` and the training code of ``pretraining``.
"""
