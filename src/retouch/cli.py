"""The command line. Each command is thin, and imports what it needs only when it runs: ``--help`` loads no torch."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from retouch import __version__
from retouch.runs.audit.arguments import add_ledger

_USER_ERROR = 2
_BASES = {
    "writer": "the writer in front of the editor that is there, and not the editor",
    "painter": "the painter, which goes on from the editor, and its enhancer",
    "emu3": "the editors of image tokens and their autoencoder",
    "words": "the painter of words and its autoencoder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 where something was found wrong, 2 where the user must change something."""
    arguments = build_parser().parse_args(argv)
    # The user's own classes (``package.module:Class``) may lie in the working folder.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        code: int = arguments.run(arguments)
    except ValueError as error:
        if arguments.debug or not _ours(error):
            raise
        print(f"retouch {arguments.command}: {error}", file=sys.stderr)
        return _USER_ERROR
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser; what it returns has ``run``, the function of the command."""
    parser = argparse.ArgumentParser(
        prog="retouch", description="Reinforcement-learning post-training for image editing and generation."
    )
    parser.add_argument("--version", action="version", version=f"retouch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of a mistake that has a plain message")
    changes = argparse.ArgumentParser(add_help=False)
    changes.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=C", help="change a key of the recipe; JSON, else text"
    )
    _training(commands, debug, changes)
    _using(commands, debug, changes)
    _looking(commands, debug, changes)
    add_ledger(commands, debug, run=_ledger)
    _serving(commands, debug)
    return parser


def _training(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", *parents: argparse.ArgumentParser) -> None:
    train = commands.add_parser("train", parents=parents, help="train; a run of the same name is resumed")
    train.add_argument("recipe", metavar="RECIPE", help="Jsonnet or JSON file, or the name of a packaged recipe")
    train.add_argument("--fresh", action="store_true", help="set an existing run of that name aside and start anew")
    train.add_argument("--new-judge", action="store_true", help="the run may go on with another judge than it had")
    train.set_defaults(run=_train)

    launch = commands.add_parser(
        "launch", parents=parents[:1], help="run a recipe, or another command, as several ranks on this machine"
    )
    launch.add_argument("--nproc", type=int, required=True, metavar="N", help="ranks")
    launch.add_argument("--gpus", type=_numbers, metavar="1,2,3", help="CUDA devices, one a rank, or as many as its recipe names")
    launch.add_argument(
        "argv", nargs=argparse.REMAINDER, metavar="RECIPE|COMMAND ...", help="as after `retouch train`, or after `retouch`"
    )
    launch.set_defaults(run=_launch)


def _using(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", *parents: argparse.ArgumentParser) -> None:
    evaluate = commands.add_parser("eval", parents=parents, help="judge a run, or a recipe's untrained policy, on held-out tasks")
    evaluate.add_argument("target", metavar="RECIPE_OR_RUN")
    evaluate.set_defaults(run=_eval)

    sample = commands.add_parser("sample", parents=parents[:1], help="use the policy as its end user would")
    sample.add_argument("target", metavar="RECIPE_OR_RUN")
    asked = sample.add_mutually_exclusive_group(required=True)
    asked.add_argument("--instruction", help="what to make or to change")
    asked.add_argument("--instructions", type=Path, metavar="FILE", help=".txt with one a line, or .jsonl with pictures too")
    sample.add_argument("--image", type=Path, metavar="IN.png", help="source picture, with --instruction")
    sample.add_argument("--mask", type=Path, metavar="MASK.png", help="where to edit, with --instruction")
    sample.add_argument("--reference", type=Path, metavar="REF.png", help="what to be like, with --instruction")
    sample.add_argument("--out", type=Path, required=True, metavar="OUT", help="the picture; with --instructions a new folder")
    sample.add_argument("--seed", type=int, default=0)
    sample.set_defaults(run=_sample)

    score = commands.add_parser("score", parents=parents[:1], help="judge a picture by one reward")
    score.add_argument(
        "reward",
        metavar="REWARD",
        help="ocr, clip:FOLDER, photos:red, package.module:Class, ...; a reward section (JSON or its file), a recipe, or a run",
    )
    score.add_argument("--image", type=Path, required=True, metavar="OUT.png", help="the picture to judge")
    score.add_argument("--source", type=Path, action="append", default=[], metavar="IN.png", help="what it was made from")
    score.add_argument("--mask", type=Path, metavar="MASK.png", help="white where to change")
    score.add_argument("--reference", type=Path, metavar="REF.png", help="a second picture that the task brings")
    score.add_argument("--target", type=Path, metavar="TARGET.png", help="the picture wanted")
    score.add_argument("--instruction", default="", help="what was asked for")
    score.add_argument("--text", help="what should be written in the picture")
    score.add_argument("--written", metavar="TEXT", help="what a policy wrote for it")
    score.add_argument("--meta", metavar="JSON", help="what else a judge knows of the task")
    score.add_argument("--json", action="store_true", help="one line of JSON")
    score.set_defaults(run=_score)

    export = commands.add_parser("export", parents=parents[:1], help="write a run's weights as diffusers and PEFT load them")
    export.add_argument("target", metavar="RUN")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--weights", choices=("average", "current"), help="average by default, where the run keeps one")
    export.set_defaults(run=_export)


def _looking(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", *parents: argparse.ArgumentParser) -> None:
    doctor = commands.add_parser("doctor", parents=parents, help="check all that can be checked before anything expensive starts")
    doctor.add_argument("recipe", nargs="?", metavar="RECIPE")
    doctor.add_argument("--distributed", action="store_true", help="under `retouch launch`: check that the ranks find each other")
    doctor.add_argument("--device", help="check this device, or plan for this GPU (h200, h100, ...)")
    doctor.set_defaults(run=_doctor)

    recipes = commands.add_parser("recipes", parents=parents[:1], help="list the recipes that come with the package")
    recipes.set_defaults(run=_recipes)

    playground = commands.add_parser("playground", help="the built-in world").add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )
    build = playground.add_parser("build", parents=parents[:1], help="train the base models of the playground again")
    build.add_argument("--out", type=Path, metavar="DIR", help="folder for the weights; by default that of the package")
    build.add_argument("--seed", type=int, default=0)
    which = build.add_mutually_exclusive_group()
    for base, told in _BASES.items():
        which.add_argument(f"--{base}", dest="base", action="store_const", const=base, help=told)
    build.set_defaults(run=_playground_build, base="editor")

    data = commands.add_parser("data", help="data sets").add_subparsers(dest="what", required=True, metavar="WHAT")
    check = data.add_parser("check", parents=parents[:1], help="read a data set as training would, and list what is wrong with it")
    check.add_argument("path", metavar="PATH")
    check.set_defaults(run=_data_check)
    tokens = data.add_parser("tokenize", parents=parents[:1], help="encode the pictures of a data set as image tokens, once")
    tokens.add_argument("source", metavar="SOURCE", help="a folder or data set, a data section (JSON or its file), or a recipe")
    tokens.add_argument("--model", required=True, metavar="PATH", help="folder or id that holds the autoencoder; or playground")
    tokens.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for feature/ and list/")
    tokens.add_argument("--size", type=int, nargs=2, default=[256, 256], metavar=("H", "W"), help="of every picture; 256 256")
    tokens.add_argument("--batch", type=int, default=8, metavar="N", help="pictures encoded at once")
    tokens.add_argument("--device", default="auto", help="auto takes a GPU for each process in turn")
    tokens.add_argument("--pictures", action="store_true", help="keep the pictures beside the codes, for judges and reports")
    tokens.add_argument("--skip", action="store_true", help="leave out rows that cannot be used, instead of stopping")
    shared = tokens.add_mutually_exclusive_group()
    shared.add_argument("--processes", type=int, default=1, metavar="N", help="processes of this machine that share the rows")
    shared.add_argument("--shard", type=_shard, metavar="K/N", help="do the K-th of N shares alone (from 0), on any machine")
    tokens.set_defaults(run=_data_tokenize)


def _serving(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", *parents: argparse.ArgumentParser) -> None:
    serve = commands.add_parser("serve", parents=parents, help="serve rewards over HTTP, as several replicas")
    serve.add_argument(
        "rewards",
        nargs="+",
        metavar="REWARD",
        help="[NAME=]playground, ocr, clip:FOLDER, package.module:Class, a reward section (JSON or its file), or a recipe",
    )
    serve.add_argument("--host", default="127.0.0.1", help="any but this machine's own needs a token")
    serve.add_argument("--port", type=int, default=8700, help="of the first replica, the others follow; 0 takes free ones")
    serve.add_argument("--replicas", type=int, default=1, metavar="N")
    serve.add_argument("--gpus", type=_numbers, metavar="1,2,3", help="CUDA devices, given to the replicas in turn")
    serve.add_argument("--engine", choices=["own", "ray"], default="own", help="who keeps the replicas: this command, or Ray Serve")
    serve.add_argument("--most-replicas", type=int, metavar="N", help="with ray: up to so many, as the load asks for")
    serve.add_argument("--ray-address", metavar="ADDRESS", help="of a Ray cluster that runs; else one is started here")
    serve.add_argument("--logs", type=Path, default=Path("runs/serve/logs"), metavar="DIR", help="one log a replica")
    serve.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token; else the variable RETOUCH_TOKEN")
    serve.add_argument("--vlm", metavar="COLUMN", help="what POST /score answers as vlm_score")
    serve.add_argument("--ocr", metavar="COLUMN", help="what it answers as ocr_confidence")
    serve.add_argument("--vlm-weight", type=float, default=1.0, metavar="W", help="of vlm_score in combined_score")
    serve.add_argument("--ocr-weight", type=float, default=0.0, metavar="W", help="of ocr_confidence in combined_score")
    serve.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        metavar="NAME=N",
        help="max_batch=64, window=0.01, max_queue=2048, ...",
    )
    serve.set_defaults(run=_serve)


def _train(arguments: argparse.Namespace) -> int:
    from retouch.runs.recipe import load

    # A mistake in the recipe is found before the slow imports.
    recipe = load(arguments.recipe, arguments.overrides)
    from retouch.runs.session import run

    return run(recipe, fresh=arguments.fresh, new_judge=arguments.new_judge)


def _launch(arguments: argparse.Namespace) -> int:
    from retouch.runs.launching import launch
    from retouch.runs.recipe import load

    argv = [word for word in arguments.argv if word != "--fresh"]
    if not argv:
        raise ValueError("launch what? `retouch launch --nproc 2 recipes/quickstart.jsonnet`")
    if argv[0] not in _LAUNCHED:
        argv = ["train", *argv]
    inner = build_parser().parse_args(argv)
    folder = Path("runs") / inner.command
    if (recipe := vars(inner).get("recipe")) is not None:
        folder = load(recipe, inner.overrides).folder
    # The ranks' logs lie in the run's folder, so it is set aside before they open.
    if "--fresh" in arguments.argv and folder.exists():
        from retouch.runs.folder import RunFolder

        print(f"the old run is now {RunFolder(folder).set_aside()}")
    return launch(arguments.nproc, arguments.gpus, argv, logs=folder / "logs")


def _eval(arguments: argparse.Namespace) -> int:
    from retouch.runs.evaluating import evaluate_target

    print(json.dumps(evaluate_target(arguments.target, arguments.overrides), indent=2))
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    if arguments.instructions is not None and (arguments.image or arguments.mask or arguments.reference):
        raise ValueError("--image, --mask and --reference go with --instruction; a .jsonl list names its own pictures")
    from retouch.runs.sampling import sample_list, sample_target

    if arguments.instructions is not None:
        made = sample_list(arguments.target, instructions=arguments.instructions, out=arguments.out, seed=arguments.seed)
        print(f"{len(made)} pictures in {arguments.out}")
    else:
        one = sample_target(
            arguments.target,
            instruction=arguments.instruction,
            image=arguments.image,
            mask=arguments.mask,
            reference=arguments.reference,
            out=arguments.out,
            seed=arguments.seed,
        )
        made = [one]
        if one.text is not None:
            print(one.text)
    if fallen := sum(each.fell_back for each in made):
        told = "of the instruction itself: nothing can be drawn of what was written"
        print(f"{fallen} of {len(made)} are {told}", file=sys.stderr)
    return 0


def _score(arguments: argparse.Namespace) -> int:
    from retouch.runs.scoring import score_files

    scored = score_files(
        arguments.reward,
        image=arguments.image,
        sources=arguments.source,
        mask=arguments.mask,
        reference=arguments.reference,
        target=arguments.target,
        instruction=arguments.instruction,
        text=arguments.text,
        written=arguments.written,
        meta=arguments.meta,
    )
    print(scored.to_json() if arguments.json else scored)
    return 1 if scored.missing else 0


def _export(arguments: argparse.Namespace) -> int:
    from retouch.runs.exporting import export_target

    for path in export_target(arguments.target, to=arguments.to, which=arguments.weights):
        print(path)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from retouch.runs.recipe import load

    recipe = None if arguments.recipe is None else load(arguments.recipe, arguments.overrides)
    from retouch.runs.doctor import examine

    changes = [word for override in arguments.overrides for word in ("--set", override)]
    named = [] if arguments.recipe is None else [arguments.recipe, *changes]
    return examine(recipe, distributed=arguments.distributed, device=arguments.device, named=named)


def _recipes(arguments: argparse.Namespace) -> int:
    from retouch.runs.recipe_files import available

    print("\n".join(available()))
    return 0


def _playground_build(arguments: argparse.Namespace) -> int:
    build: Callable[..., object]
    match arguments.base:
        case "writer":
            from retouch.bases.build_writer import build_writer

            build = build_writer
        case "painter":
            from retouch.bases.build_painter import build_painter

            build = build_painter
        case "emu3":
            from retouch.bases.build_emu3 import build_emu3

            build = build_emu3
        case "words":
            from retouch.bases.build_words import build_words

            build = build_words
        case _:
            from retouch.bases.build import build as build_editor

            build = build_editor
    build(arguments.out, seed=arguments.seed)
    return 0


def _data_check(arguments: argparse.Namespace) -> int:
    from retouch.data.check import check

    problems = check(arguments.path)
    for problem in problems:
        print(problem)
    errors = sum(problem.severity == "error" for problem in problems)
    print(f"{arguments.path}: {errors} errors, {len(problems) - errors} notes")
    return 1 if errors else 0


def _data_tokenize(arguments: argparse.Namespace) -> int:
    from retouch.runs.tokenizing import Job, tokenize, tokenize_shard

    job = Job(
        source=arguments.source,
        model=arguments.model,
        out=arguments.out,
        size=(arguments.size[0], arguments.size[1]),
        batch=arguments.batch,
        device=arguments.device,
        pictures=arguments.pictures,
        skip=arguments.skip,
    )
    shard, of = arguments.shard or (0, 1)
    found = tokenize_shard(job, shard, of=of) if arguments.shard else tokenize(job, processes=arguments.processes)
    print(f"shard {shard} of {of} is done; the list is made when all are" if found is None else found)
    return 0


def _ledger(arguments: argparse.Namespace) -> int:
    from retouch.runs.audit.command import ledger_command

    print(ledger_command(arguments))
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from retouch.serving.command import serve_command

    return serve_command(arguments)


_LAUNCHED = ("train", "eval", "doctor")


def _shard(text: str) -> tuple[int, int]:
    shard, _, of = text.partition("/")
    return int(shard), int(of)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _ours(error: ValueError) -> bool:
    """Whether the error was raised by this package: a message for the user, and not a fault in what we called."""
    raised_in = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(raised_in.f_globals.get("__name__", "")).split(".")[0] == "retouch" or raised_in.f_globals is globals()


if __name__ == "__main__":
    sys.exit(main())
