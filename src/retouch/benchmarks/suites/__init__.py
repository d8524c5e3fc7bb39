"""The suites, one file each: source, licence, size, protocol and known deviations, the loader of its data, and its formula.

A suite derives from ``retouch.benchmarks.suite.Suite``. May import ``rewards``, ``data``, ``playground`` and ``benchmarks.suite``,
and no torch at module level.
"""
