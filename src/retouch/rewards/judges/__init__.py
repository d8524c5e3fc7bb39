"""Rewards that ask a vision-language model: each phrases its questions, and turns the answers into columns. One file a reward.

Example::

    judge = Endpoint(model="Qwen/Qwen2.5-VL-72B-Instruct", base_url="http://localhost:4877/v1", key=None)
    reward = AspectsReward(judge=judge, n_evals=3, temperature=0.7)
    reward([Sample(task, image)])  # {"alignment": ..., "quality": ..., "identity": ...}

``base.py`` is what they share, ``panel.py`` asks their prompts, ``rubrics.py`` and ``prompts/`` hold the texts. May import
``rewards.base`` and ``rewards.vlm``; torch only inside functions.
"""
