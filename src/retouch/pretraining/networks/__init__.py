"""The playground's small models: Qwen-Image, Qwen-VL, FLUX.1 and Emu3 classes with few parameters, and how each is trained."""
