"""``retouch train`` and ``retouch launch``."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option, integers, set_option


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
    from retouch.run.session import run

    return run(recipe, fresh=arguments.fresh, new_judge=arguments.new_judge)


_LAUNCHABLE = ("train", "eval", "doctor")


def add_launch(commands: Commands, *, parser: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Add the command. ``parser``: builds the parser of the launched command from its arguments."""
    launch = commands.add_parser(
        "launch", parents=[debug_option()], help="run a recipe, or another command, on several ranks of this machine"
    )
    launch.add_argument("--nproc", type=int, required=True, metavar="N", help="number of ranks")
    launch.add_argument(
        "--gpus",
        type=integers,
        metavar="1,2,3",
        help="CUDA devices, divided among the ranks: one per rank, or as many per rank as the recipe uses",
    )
    launch.add_argument(
        "argv",
        nargs=argparse.REMAINDER,
        metavar="RECIPE|COMMAND ...",
        help="a recipe with the options of `retouch train`, or a command with its arguments",
    )
    launch.set_defaults(run=partial(_launch, parser))


def _launch(parser: Callable[[Sequence[str]], argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    from retouch.config import consent
    from retouch.distributed.launching import launch
    from retouch.recipe.recipe import load
    from retouch.records import files

    argv = [word for word in arguments.argv if word != "--fresh"]
    if not argv:
        raise ValueError("nothing to launch: add a recipe, for example `retouch launch --nproc 2 recipes/quickstart.jsonnet`")
    if argv[0] not in _LAUNCHABLE:
        argv = ["train", *argv]
    command = parser(argv).parse_args(argv)
    # What the user allows here is also allowed in the ranks, which cannot ask.
    with consent.allowing(command.allow_import, ask=True):
        if (recipe := vars(command).get("recipe")) is None:
            return launch(arguments.nproc, arguments.gpus, argv, logs=files.inside(Path("runs"), command.command, "logs"))
        folder = load(recipe, command.overrides).folder
        if command.command != "train":  # its logs must not replace those of the run, which may be training
            return launch(arguments.nproc, arguments.gpus, argv, logs=files.inside(folder, f"logs-{command.command}"))
        from retouch.records.folder import own

        # The logs of the ranks are in the run's folder: own it, and rename an old run, before they are opened.
        run, aside = own(folder, fresh="--fresh" in arguments.argv, environment={})
        if aside is not None:
            print(f"the old run is now {aside}")
        assert run.owner is not None
        with closing(run.owner) as owner:
            return launch(arguments.nproc, arguments.gpus, argv, logs=run.root / "logs", owner=owner)
