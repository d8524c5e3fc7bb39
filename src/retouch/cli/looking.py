"""``retouch doctor`` and ``retouch recipes``."""

import argparse

from retouch.cli.parsing import Commands


def add_looking(commands: Commands, debug: argparse.ArgumentParser, changes: argparse.ArgumentParser) -> None:
    """Add both."""
    doctor = commands.add_parser(
        "doctor", parents=[debug, changes], help="check all that can be checked before anything expensive starts"
    )
    doctor.add_argument("recipe", nargs="?", metavar="RECIPE")
    doctor.add_argument("--distributed", action="store_true", help="under `retouch launch`: check that the ranks find each other")
    doctor.add_argument("--device", help="check this device, or plan for this GPU (h200, h100, ...)")
    doctor.set_defaults(run=_doctor)

    recipes = commands.add_parser("recipes", parents=[debug], help="list the recipes that come with the package")
    recipes.set_defaults(run=_recipes)


def _doctor(arguments: argparse.Namespace) -> int:
    from retouch.recipe.recipe import load

    recipe = None if arguments.recipe is None else load(arguments.recipe, arguments.overrides)
    from retouch.doctor.doctor import examine

    changes = [word for override in arguments.overrides for word in ("--set", override)]
    named = [] if arguments.recipe is None else [arguments.recipe, *changes]
    return examine(recipe, distributed=arguments.distributed, device=arguments.device, named=named)


def _recipes(arguments: argparse.Namespace) -> int:
    from retouch.config.packaged import available

    print("\n".join(available()))
    return 0
