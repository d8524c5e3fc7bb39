"""``retouch recipes``."""

import argparse

from retouch.cli.arguments import Commands, debug_option


def add_recipes(commands: Commands) -> None:
    """Add the command."""
    recipes = commands.add_parser("recipes", parents=[debug_option()], help="list the packaged recipes")
    recipes.set_defaults(run=_recipes)


def _recipes(arguments: argparse.Namespace) -> int:
    from retouch.config.packaged import available

    print("\n".join(available()))
    return 0
