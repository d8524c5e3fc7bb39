"""The mathematics of training: advantages, surrogate losses, loss weights, SDE transitions, divergences, token distributions.

Every function is pure, takes tensors and returns tensors in fp32 (unless its docstring says otherwise), and cites its source. A
module here may import torch and other modules of ``core``, and nothing else of the project.
"""
