"""``retouch doctor``."""

import argparse

from retouch.cli.arguments import Commands, debug_option, import_option, set_option


def add_doctor(commands: Commands) -> None:
    """Add the command."""
    doctor = commands.add_parser(
        "doctor",
        parents=[debug_option(), set_option(), import_option()],
        help="check the installation and a recipe before an expensive run starts",
    )
    doctor.add_argument("recipe", nargs="?", metavar="RECIPE")
    doctor.add_argument("--distributed", action="store_true", help="under `retouch launch`: check that the ranks can communicate")
    doctor.add_argument("--device", help="check this device, or plan for this GPU (h200, h100, ...)")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from retouch.recipe.recipe import load

    recipe = None if arguments.recipe is None else load(arguments.recipe, arguments.overrides)
    from retouch.doctor.doctor import run_checks

    changes = [word for override in arguments.overrides for word in ("--set", override)]
    allowed = [word for module in arguments.allow_import for word in ("--allow-import", module)]
    named = [] if arguments.recipe is None else [arguments.recipe, *allowed, *changes]
    return run_checks(recipe, distributed=arguments.distributed, device=arguments.device, arguments=named)
