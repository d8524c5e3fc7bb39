"""`retouch doctor`: the checks before a run (installation, data, reward, memory, ranks, a trial step), each of which returns
findings.

A new check of a recipe belongs here. This package may import everything that a run is built from, up to `retouch.run`; only
`retouch.cli` imports this package.
"""
