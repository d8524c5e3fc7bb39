"""Argument types and option groups that several commands share."""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
LAST_PORT = 65535
TARGET_HELP = (
    "a recipe file, the name of an included recipe, the folder of a run, or the name of a run in the folder runs; a recipe comes "
    "before a run of the same name"
)
RUN_HELP = "the folder of a run, or the name of a run in the folder runs"
_Made = TypeVar("_Made")


def called(function: Callable[..., _Made], arguments: argparse.Namespace) -> _Made:
    """Call the function with the options that have the names of its parameters. Other parameters keep their defaults."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in vars(arguments).items() if name in names})


def integers(text: str) -> list[int]:
    """Parse "1,2,3"."""
    return [int(part) for part in text.split(",")]


def positive(text: str) -> int:
    """Parse a whole number above 0."""
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def port(text: str) -> int:
    """Parse the number of a TCP port; 0 stands for a free one."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= LAST_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to {LAST_PORT}")
    return int(text)


def run_folder(text: str) -> Path:
    """Find a run by ``retouch.records.folder.find_run``, which is imported only if a command names a run."""
    from retouch.records.folder import find_run

    return find_run(text)


def utf8(text: str) -> str:
    """Refuse bytes of the command line that are not UTF-8; Python represents them as unpaired surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a:.80} is not UTF-8 text") from None
    return text


def debug_option() -> argparse.ArgumentParser:
    """The parent parser with ``--debug``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error instead of only its message")
    return parser


def import_option() -> argparse.ArgumentParser:
    """The parent parser with ``--allow-import``, for commands that read recipes or runs."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--allow-import",
        action="append",
        default=[],
        metavar="MODULE",
        help="allow the recipe to import this module of yours; a package includes its modules (or set RETOUCH_ALLOW_IMPORTS)",
    )
    return parser


def set_option() -> argparse.ArgumentParser:
    """The parent parser with ``--set``, which changes keys of the recipe."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--set",
        dest="overrides",
        type=utf8,
        action="append",
        default=[],
        metavar="A.B=C",
        help="change a key of the recipe; the value is parsed as JSON, or taken as text if it is not JSON",
    )
    return parser
