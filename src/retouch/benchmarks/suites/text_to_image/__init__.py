"""Suites of prompts for images. One file a suite, or a family of suites that share their data or their scorer."""
