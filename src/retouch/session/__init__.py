"""Executes a run from its recipe to its report: start or resume, train, save, evaluate, summarise.

This is the top of the library: it may import everything except ``doctor``, ``audit``, ``serving``, ``pretraining`` and ``cli``.
"""
