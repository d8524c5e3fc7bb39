"""``retouch votes``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option


def add_votes(commands: Commands) -> None:
    """Add the command and its subcommands."""
    votes = commands.add_parser(
        "votes",
        parents=[debug_option(), import_option()],
        help="analyze votes: win rates, agreement of judges with people, voters; export pairs for DPO; calibrate a judge",
    )
    votes.add_argument("votes_of", type=Path, metavar="RUN", help="the folder of a run, or of a vote queue")
    votes.add_argument("--json", action="store_true")
    votes.set_defaults(run=_votes, what="show")
    what = votes.add_subparsers(metavar="WHAT")

    export = what.add_parser("export", help="write a folder with chosen and rejected images, for DPO")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder")
    export.set_defaults(what="export")
    calibrate = what.add_parser(
        "calibrate", help="fit the map from a judge's score to the probability that people prefer the image"
    )
    calibrate.add_argument("column", metavar="COLUMN", help="column of the judge")
    calibrate.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="file for the map, which a reward of kind `calibrated` reads"
    )
    calibrate.set_defaults(what="calibrate")
    simulate = what.add_parser(
        "simulate", help="answer a vote queue with the scores of a reward instead of people; stop it with Ctrl-C"
    )
    simulate.add_argument("reward", metavar="REWARD", help="a reward, named as in `retouch score`")
    simulate.add_argument("--column", required=True, help="column of the reward that decides the votes")
    simulate.add_argument("--noise", type=float, default=0.0, help="P(left) = sigmoid(score difference / noise)")
    simulate.add_argument("--tie", type=float, default=0.0, help="vote for a tie if the scores differ by less than this")
    simulate.add_argument("--limit", type=int, metavar="N", help="stop after N votes")
    simulate.add_argument("--voter", default="simulated", metavar="NAME")
    simulate.add_argument("--seed", type=int, default=0)
    simulate.set_defaults(what="simulate")


def _votes(arguments: argparse.Namespace) -> int:
    from retouch.votes.command import votes_command

    print(votes_command(arguments))
    return 0
