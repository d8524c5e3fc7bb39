"""``retouch ledger``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import RUN_HELP, Commands, debug_option, import_option, run_folder


def add_ledger(commands: Commands) -> None:
    """Add the command and its subcommands."""
    ledger = commands.add_parser(
        "ledger",
        parents=[debug_option(), import_option()],
        help="show the scores of a run, the judges and the cost; score the images again",
    )
    ledger.add_argument("ledger_of", type=run_folder, metavar="RUN", help=RUN_HELP)
    ledger.add_argument("--json", action="store_true")
    ledger.add_argument(
        "--prices", type=_prices, metavar="IN,OUT", help="prices per million input and output tokens, if the recipe has none"
    )
    ledger.set_defaults(run=_ledger, what="cost")
    what = ledger.add_subparsers(metavar="WHAT")

    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", default=argparse.SUPPRESS)
    subset = argparse.ArgumentParser(add_help=False, parents=[as_json])
    subset.add_argument(
        "--split", choices=("train", "heldout", "ceiling", "best", "watch", "canary"), help="use only this split (default: all)"
    )
    subset.add_argument("--steps", type=_steps, metavar="A:B", help="use only steps A to B, inclusive")
    cost = what.add_parser(
        "cost", parents=[as_json], help="show what was scored, by which judges, and the cost so far (the default)"
    )
    cost.add_argument("--prices", type=_prices, metavar="IN,OUT", default=argparse.SUPPRESS)
    cost.set_defaults(what="cost")
    for name, description in (
        ("agree", "measure the agreement of two columns"),
        ("worst", "show the samples on which two columns differ most"),
    ):
        compare = what.add_parser(name, parents=[subset], help=description)
        compare.add_argument("column", metavar="COLUMN")
        compare.add_argument("other", nargs="?", metavar="OTHER", help="the second column; NAME:COLUMN for scores of `rescore`")
        compare.add_argument(
            "--ratings", type=Path, metavar="FILE.csv", help="compare with these human ratings instead of a second column"
        )
        compare.add_argument("--top", type=int, default=20, metavar="N", help="number of samples that `worst` shows")
        compare.set_defaults(what=name)
    rescore = what.add_parser("rescore", parents=[subset], help="score the stored images with another reward")
    rescore.add_argument("reward", metavar="REWARD", help="a reward, named as in `retouch score`")
    rescore.add_argument("--name", help="prefix of the new columns (default: the name of the reward)")
    rescore.set_defaults(what="rescore")
    expel = what.add_parser(
        "expel", parents=[subset], help="exclude wrong scores from use; without a selection, all scores that are not finite"
    )
    expel.add_argument("--image", metavar="HASH", help="select by image: the first 8 or more digits of its hash")
    expel.add_argument("--judge", help="select by judge, named as in the table of `retouch ledger RUN`")
    expel.add_argument("--dry-run", action="store_true", help="only list what would be excluded")
    expel.set_defaults(what="expel")


def _ledger(arguments: argparse.Namespace) -> int:
    from retouch.audit.command import ledger_command

    print(ledger_command(arguments))
    return 0


def _prices(text: str) -> tuple[float, float]:
    input_price, output_price = text.split(",")
    return float(input_price), float(output_price)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last or first)
