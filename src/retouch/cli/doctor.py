"""``retouch doctor``."""

import argparse
import sys

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
    doctor.add_argument(
        "--rehearse",
        action="store_true",
        help="run the recipe's step at full size on fake tensors: errors, peak memory and time, without weights or a GPU",
    )
    doctor.add_argument(
        "--full-depth", action="store_true", help="with --rehearse: all blocks of the models, instead of a few at two depths"
    )
    doctor.add_argument("--ranks", type=int, help="with --rehearse: as rank 0 of so many ranks (default: the recipe's)")
    doctor.add_argument("--device", help="check this device, or plan for this GPU (h200, h100, ...) or profile (FILE.json)")
    doctor.add_argument(
        "--base", metavar="MODEL", help="a model with the size of policy.model.path, to plan with while that does not exist yet"
    )
    doctor.add_argument("--estimate", action="store_true", help="estimate time and GPU hours, from a rehearsal of the step")
    doctor.add_argument(
        "--price-per-hour", type=float, metavar="DOLLARS", help="of one GPU: estimate the cost too, with paid calls of judges"
    )
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    from retouch.recipe.recipe import load

    recipe = None if arguments.recipe is None else load(arguments.recipe, arguments.overrides)
    if arguments.rehearse:
        if recipe is None:
            raise ValueError("--rehearse: name a recipe")
        from retouch.rehearsal.command import run_rehearsal

        return run_rehearsal(
            recipe, machine=arguments.device, world=arguments.ranks, full_depth=arguments.full_depth, out=sys.stdout
        )
    from retouch.doctor.doctor import Wishes, run_checks

    price = arguments.price_per_hour
    if price is not None and not price >= 0:
        raise ValueError(f"--price-per-hour {price:g}: give the dollars that one GPU costs in an hour")
    estimate = arguments.estimate or price is not None
    if estimate and recipe is None:
        raise ValueError("--estimate and --price-per-hour: name a recipe")
    wishes = Wishes(device=arguments.device, base=arguments.base, estimate=estimate, price=price)

    changes = [word for override in arguments.overrides for word in ("--set", override)]
    allowed = [word for module in arguments.allow_import for word in ("--allow-import", module)]
    named = [] if arguments.recipe is None else [arguments.recipe, *allowed, *changes]
    return run_checks(recipe, distributed=arguments.distributed, wishes=wishes, arguments=named)
