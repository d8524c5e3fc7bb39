"""Data sets that are read while the run trains: the order of shards and rows, and loading in another process.

It may import ``data`` without its sources.
"""
