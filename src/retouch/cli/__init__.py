"""The command line: one file per command, which declares the arguments and calls the package that does the work.

It may import every other package, but only inside the function of a command, so that ``retouch --help`` loads none of them.
"""

from retouch.cli.parser import build_parser, main

__all__ = ["build_parser", "main"]
