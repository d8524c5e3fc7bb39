"""``retouch launch``."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, integers

_LAUNCHABLE = ("train", "eval", "doctor")


def add_launch(commands: Commands, *, parse: Callable[[Sequence[str]], argparse.Namespace]) -> None:
    """Add the command; ``parse`` parses the arguments of the command that is launched."""
    launch = commands.add_parser(
        "launch", parents=[debug_option()], help="run a recipe, or another command, on several ranks of this machine"
    )
    launch.add_argument("--nproc", type=int, required=True, metavar="N", help="number of ranks")
    launch.add_argument(
        "--gpus", type=integers, metavar="1,2,3", help="CUDA devices: one per rank, or as many per rank as the recipe uses"
    )
    launch.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="RECIPE|COMMAND ...", help="as after `retouch train`, or after `retouch`"
    )
    launch.set_defaults(run=partial(_launch, parse))


def _launch(parse: Callable[[Sequence[str]], argparse.Namespace], arguments: argparse.Namespace) -> int:
    from retouch.distributed.launching import launch
    from retouch.recipe.recipe import load

    argv = [word for word in arguments.argv if word != "--fresh"]
    if not argv:
        raise ValueError("nothing to launch: add a recipe, for example `retouch launch --nproc 2 recipes/quickstart.jsonnet`")
    if argv[0] not in _LAUNCHABLE:
        argv = ["train", *argv]
    command = parse(argv)
    folder = Path("runs") / command.command
    if (recipe := vars(command).get("recipe")) is not None:
        folder = load(recipe, command.overrides).folder
    # The ranks' logs are in the run's folder, so an old run must be renamed before they are opened.
    if "--fresh" in arguments.argv and folder.exists():
        from retouch.records.folder import RunFolder

        print(f"the old run is now {RunFolder(folder).set_aside()}")
    return launch(arguments.nproc, arguments.gpus, argv, logs=folder / "logs")
