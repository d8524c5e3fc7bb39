"""What a rehearsal replaces: the accelerator (tensors without data, its kernels for attention), the other ranks, DeepSpeed, weights
and tokenizers.

The accelerator's modules (``accelerator.py``, ``tensors.py``, ``attention.py``) import torch and nothing else of the project.
"""
