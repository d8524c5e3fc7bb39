"""``retouch eval``."""

import argparse
import json

from retouch.cli.arguments import TARGET_HELP, Commands, debug_option, import_option, set_option


def add_eval(commands: Commands) -> None:
    """Add the command."""
    evaluate = commands.add_parser(
        "eval",
        parents=[debug_option(), set_option(), import_option()],
        help="evaluate a run, or a recipe's untrained policy, on held-out tasks",
    )
    evaluate.add_argument("target", metavar="RECIPE_OR_RUN", help=TARGET_HELP)
    evaluate.add_argument(
        "--data", metavar="PATH", help="evaluate on all rows of this data set (path or Hub id) instead; test sets are allowed"
    )
    evaluate.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from retouch.inference.evaluation import evaluate_target

    print(json.dumps(evaluate_target(arguments.target, arguments.overrides, data=arguments.data), indent=2))
    return 0
