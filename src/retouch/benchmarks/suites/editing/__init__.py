"""Suites of editing instructions. One file a suite, or a family of suites that share their data or their judge.

May import ``benchmarks.suite``, ``benchmarks.suites.row_suite``, ``data`` and ``rewards``; torch only inside functions.
"""
