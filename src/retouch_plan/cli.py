"""``retouch doctor``."""

import argparse
import sys

from retouch.cli.arguments import Commands, debug_option, import_option, set_option


def add_doctor(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        parents=[debug_option(), set_option(), import_option()],
        help="check the installation and a recipe before an expensive run starts",
    )
    doctor.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe, or SCRIPT.py that makes a Trainer and trains it")
    doctor.add_argument("--distributed", action="store_true", help="with `retouch launch`: check that the ranks can communicate")
    doctor.add_argument(
        "--rehearse",
        action="store_true",
        help="run the recipe's step at full size on fake tensors: errors, peak memory and time, without weights or a GPU",
    )
    doctor.add_argument(
        "--full-depth",
        action="store_true",
        help="with --rehearse: run all blocks of the models, instead of extrapolating from two small depths",
    )
    doctor.add_argument(
        "--ranks", type=int, help="with --rehearse: as rank 0 of this many ranks (default: the ranks of the recipe)"
    )
    doctor.add_argument("--device", help="check for this device, this GPU (h200, h100, ...) or this measured profile (FILE.json)")
    doctor.add_argument(
        "--base",
        metavar="MODEL",
        help="make the dry run with this model of the same size while policy.model.path does not exist yet",
    )
    doctor.add_argument(
        "--no-rehearsal",
        action="store_true",
        help="make no dry run of a step, which takes up to a minute; memory and time are not checked then",
    )
    doctor.add_argument(
        "--estimate",
        action="store_true",
        help="also make a dry run for the CPU, to estimate the time and GPU hours of the recipe on a GPU",
    )
    doctor.add_argument(
        "--price-per-hour",
        type=float,
        metavar="DOLLARS",
        help="price of one GPU hour: also estimate the cost, including paid requests to judges",
    )
    doctor.add_argument(
        "--report",
        action="store_true",
        help="print what a report of a bug needs: versions, hardware, and the recipe of a run or file, without keys and folders",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.report:
        from retouch_plan.system import support_report

        print(support_report(arguments.recipe, arguments.overrides))
        return 0
    if str(arguments.recipe).endswith(".py"):
        from retouch_plan.doctor import check_script

        if arguments.overrides:
            raise ValueError(f"--set: {arguments.recipe} makes its own Trainer; change its arguments there")
        of_recipes = ["distributed", "rehearse", "full_depth", "ranks", "base", "no_rehearsal", "estimate", "price_per_hour"]
        for name in [*of_recipes, "allow_import"]:
            if getattr(arguments, name):
                raise ValueError(f"--{name.replace('_', '-')}: a script takes only --device; the other options are for recipes")
        return 0 if check_script(arguments.recipe, device=arguments.device) else 1
    from retouch.recipe.recipe import load

    recipe = None if arguments.recipe is None else load(arguments.recipe, arguments.overrides)
    if arguments.rehearse:
        if recipe is None:
            raise ValueError("--rehearse needs a recipe: retouch doctor RECIPE --rehearse")
        from retouch_plan.estimate import print_dry_run

        return print_dry_run(
            recipe, machine=arguments.device, world=arguments.ranks, full_depth=arguments.full_depth, out=sys.stdout
        )
    from retouch_plan.doctor import DoctorOptions, run_checks

    price = arguments.price_per_hour
    if price is not None and not price >= 0:
        raise ValueError(f"--price-per-hour {price:g}: must be at least 0, the price of one GPU hour in dollars")
    estimate = arguments.estimate or price is not None
    if estimate and recipe is None:
        raise ValueError("--estimate and --price-per-hour need a recipe: retouch doctor RECIPE --estimate")
    if estimate and arguments.no_rehearsal:
        raise ValueError("--estimate and --price-per-hour need a dry run: omit --no-rehearsal")
    options = DoctorOptions(
        device=arguments.device, base=arguments.base, dry_run=not arguments.no_rehearsal, estimate=estimate, price=price
    )

    changes = [word for override in arguments.overrides for word in ("--set", override)]
    allowed = [word for module in arguments.allow_import for word in ("--allow-import", module)]
    named = [] if arguments.recipe is None else [arguments.recipe, *allowed, *changes]
    return run_checks(recipe, distributed=arguments.distributed, options=options, arguments=named)
