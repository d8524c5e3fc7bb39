"""The command line: one file a command, each of which parses its arguments and calls the package that does the work.

It may import every other package, but only inside the function of a command, so that ``retouch --help`` loads nothing.
"""

from retouch.cli.command_line import build_parser, main

__all__ = ["build_parser", "main"]
