"""``retouch train``."""

import argparse

from retouch.cli.arguments import Commands, debug_option, import_option, set_option


def add_train(commands: Commands) -> None:
    """Add the command."""
    train = commands.add_parser(
        "train", parents=[debug_option(), set_option(), import_option()], help="train a recipe; a run with the same name is resumed"
    )
    train.add_argument("recipe", metavar="RECIPE", help="Jsonnet or JSON file, or the name of a packaged recipe")
    train.add_argument("--fresh", action="store_true", help="rename an existing run with this name and start from the beginning")
    train.add_argument("--new-judge", action="store_true", help="allow the run to resume with a different judge")
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from retouch.recipe.recipe import load

    # Load the recipe before the slow imports, so that a mistake in it is reported at once.
    recipe = load(arguments.recipe, arguments.overrides)
    from retouch.session.session import run

    return run(recipe, fresh=arguments.fresh, new_judge=arguments.new_judge)
