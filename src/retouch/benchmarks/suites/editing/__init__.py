"""Suites of editing instructions. One file a suite, or a family of suites that share their data or their judge."""
