"""``retouch train`` and ``retouch launch``."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from retouch.cli.parsing import Commands, numbers

_LAUNCHED = ("train", "eval", "doctor")


def add_training(
    commands: Commands,
    debug: argparse.ArgumentParser,
    changes: argparse.ArgumentParser,
    *,
    parse: Callable[[Sequence[str]], argparse.Namespace],
) -> None:
    """Add both; ``parse`` reads the words of the command that is launched."""
    train = commands.add_parser("train", parents=[debug, changes], help="train; a run of the same name is resumed")
    train.add_argument("recipe", metavar="RECIPE", help="Jsonnet or JSON file, or the name of a packaged recipe")
    train.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")
    train.add_argument("--new-judge", action="store_true", help="the run may go on with another judge than it had")
    train.set_defaults(run=_train)

    launch = commands.add_parser(
        "launch", parents=[debug], help="run a recipe, or another command, as several ranks on this machine"
    )
    launch.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks")
    launch.add_argument("--gpus", type=numbers, metavar="1,2,3", help="CUDA devices, one a rank, or as many as its recipe names")
    launch.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="RECIPE|COMMAND ...", help="as after `retouch train`, or after `retouch`"
    )
    launch.set_defaults(run=partial(_launch, parse))


def _train(arguments: argparse.Namespace) -> int:
    from retouch.recipe.recipe import load

    # A mistake in the recipe is found before the slow imports.
    recipe = load(arguments.recipe, arguments.overrides)
    from retouch.session.session import run

    return run(recipe, fresh=arguments.fresh, new_judge=arguments.new_judge)


def _launch(parse: Callable[[Sequence[str]], argparse.Namespace], arguments: argparse.Namespace) -> int:
    from retouch.distributed.launching import launch
    from retouch.recipe.recipe import load

    argv = [word for word in arguments.argv if word != "--fresh"]
    if not argv:
        raise ValueError("launch what? `retouch launch --nproc 2 recipes/quickstart.jsonnet`")
    if argv[0] not in _LAUNCHED:
        argv = ["train", *argv]
    inner = parse(argv)
    folder = Path("runs") / inner.command
    if (recipe := vars(inner).get("recipe")) is not None:
        folder = load(recipe, inner.overrides).folder
    # The ranks' logs lie in the run's folder, so it is set aside before they open.
    if "--fresh" in arguments.argv and folder.exists():
        from retouch.records.folder import RunFolder

        print(f"the old run is now {RunFolder(folder).set_aside()}")
    return launch(arguments.nproc, arguments.gpus, argv, logs=folder / "logs")
