"""Suites of editing instructions. One file per suite, or per family of suites that share their data or their judge.

May import ``benchmarks.suite``, ``benchmarks.suites.row_suite``, ``data`` and ``rewards``; torch only inside functions.
"""
