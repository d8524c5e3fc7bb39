"""Builds the playground's base models from a seed (``retouch tools playground``): one file for each group of weights, with the
small networks, their training and their scores; ``training.py`` has what they share. It may import every layer below ``cli``.
"""
