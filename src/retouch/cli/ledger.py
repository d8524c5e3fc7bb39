"""``retouch ledger``."""

import argparse
from pathlib import Path

from retouch.cli.parsing import Commands


def add_ledger(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add the command and what it is asked for."""
    ledger = commands.add_parser("ledger", parents=[debug], help="what a run scored, by whom, at what cost; judging it again")
    ledger.add_argument("ledger_of", type=Path, metavar="RUN", help="the folder of a run")
    ledger.add_argument("--json", action="store_true")
    ledger.add_argument("--prices", type=_prices, metavar="IN,OUT", help="of a million tokens, where the recipe named none")
    ledger.set_defaults(run=_ledger, what="cost")
    what = ledger.add_subparsers(metavar="WHAT")

    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    some = argparse.ArgumentParser(add_help=False, parents=[as_json])
    some.add_argument("--split", choices=("train", "heldout", "ceiling", "best", "watch", "canary"), help="by default all")
    some.add_argument("--steps", type=_steps, metavar="A:B", help="from step A to step B, both included")
    cost = what.add_parser("cost", parents=[as_json], help="what was scored, by whom, and what it cost so far; the default")
    cost.add_argument("--prices", type=_prices, metavar="IN,OUT", default=argparse.SUPPRESS)
    cost.set_defaults(what="cost")
    for name, says in (("agree", "how far two columns agree"), ("worst", "the samples on which two columns are furthest apart")):
        compare = what.add_parser(name, parents=[some], help=says)
        compare.add_argument("column", metavar="COLUMN")
        compare.add_argument("other", nargs="?", metavar="OTHER", help="a second column, NAME:COLUMN where it was judged again")
        compare.add_argument("--ratings", type=Path, metavar="FILE.csv", help="people's ratings in place of a second column")
        compare.add_argument("--top", type=int, default=20, metavar="N", help="of the worst")
        compare.set_defaults(what=name)
    rescore = what.add_parser("rescore", parents=[some], help="judge the pictures that are left by another reward")
    rescore.add_argument("reward", metavar="REWARD", help="as in `retouch score`")
    rescore.add_argument("--name", help="what its columns are called by; by default after the reward")
    rescore.set_defaults(what="rescore")


def _ledger(arguments: argparse.Namespace) -> int:
    from retouch.audit.command import ledger_command

    print(ledger_command(arguments))
    return 0


def _prices(text: str) -> tuple[float, float]:
    read, written = text.split(",")
    return float(read), float(written)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last or first)
