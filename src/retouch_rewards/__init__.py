"""Rewards of published models: of images (CLIP, DINO, LPIPS, GenEval, reward models), of text in images (OCR), and of written text.

May import ``retouch``. The file of a reward imports torch and transformers only inside functions; ``networks.py`` and
``reward_heads.py``, which have the models, at the top. From Python, every reward has a short name in ``retouch.rewards``.
"""
