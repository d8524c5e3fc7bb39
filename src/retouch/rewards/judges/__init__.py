"""Rewards that ask a vision-language model: each one writes its questions, and converts the answers to columns.

Example::

    judge = Endpoint(model="Qwen/Qwen2.5-VL-72B-Instruct", base_url="http://localhost:4877/v1", key=None)
    reward = AspectsReward(judge=judge, n_evals=3, temperature=0.7)
    reward([Sample(task, image)])  # {"alignment": ..., "quality": ..., "identity": ...}

Each file contains one reward or one family of rewards. ``base.py`` has their base class, ``rubrics.py`` sends their prompts,
and ``prompts/`` contains the texts. Modules may import ``rewards.base`` and ``rewards.vlm``; torch only inside
functions.
"""
