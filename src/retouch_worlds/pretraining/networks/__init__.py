"""The playground's small models: classes of Qwen-Image, Qwen-VL, FLUX.1 and Emu3 with few parameters, and the training of each.

It may import ``models``, ``playground.world``, ``core`` and the training code of ``pretraining``.
"""
