"""Suites of prompts for images. One file a suite, or a family of suites that share their data or their scorer.

May import ``benchmarks.suite``, ``benchmarks.suites.row_suite``, ``data`` and ``rewards``; torch only inside functions.
"""
