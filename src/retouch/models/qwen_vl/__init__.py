"""Qwen's instruct models as writers: Qwen2-VL, Qwen2.5-VL and Qwen3-VL with images, Qwen2.5 and Qwen3 without.

It may import ``models.language``, ``models.common`` and what these may import. Only ``family.py`` is imported when a recipe is
read."""
