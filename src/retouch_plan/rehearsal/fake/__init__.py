"""The fake accelerator of a rehearsal: tensors without data, its kernels for attention, and tokenizers without files.

It may import torch and transformers, and nothing else of the project.
"""
