"""The suites, one file for each group, with source, licence, size, protocol, deviations, the loader of the data, and the formula.

A suite derives from ``retouch_bench.suite.Suite``. May import ``rewards``, ``data``, ``retouch_judge``, ``retouch_worlds``,
``records.files`` and ``retouch_bench.suite``, and no torch at module level.
"""
