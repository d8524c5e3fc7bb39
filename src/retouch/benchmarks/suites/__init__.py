"""The suites, one file each, with source, licence, size, protocol, known deviations, the loader of the data, and the formula.

A suite derives from ``retouch.benchmarks.suite.Suite``. May import ``rewards``, ``data``, ``playground``, ``records.files`` and
``benchmarks.suite``, and no torch at module level.
"""
