"""The suites, one file each, with source, licence, size, protocol, known deviations, the loader of the data, and the formula.

A suite derives from ``retouch_bench.suite.Suite``. May import ``rewards``, ``data``, ``playground``, ``records.files`` and
``benchmarks.suite``, and no torch at module level.
"""
