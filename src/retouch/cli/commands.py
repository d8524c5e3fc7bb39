"""The commands of the core: train, launch, eval, sample, score, export, convert, recipes and data.

The destination of an option is the name of the parameter that receives it (``called``), so each option is declared once.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.cli.arguments import (
    RUN_HELP,
    TARGET_HELP,
    Commands,
    called,
    debug_option,
    import_option,
    integers,
    positive,
    run_folder,
    set_option,
    utf8,
)
from retouch.config import consent, wings
from retouch.config.packaged import GOALS, TWIN, find, header, is_recipe, near_names, summaries
from retouch.data.guard import find_test_sets

if TYPE_CHECKING:
    from retouch.data.rows import Problem, Rows

_LAUNCHABLE = ("train", "eval", "doctor")
_RECIPES = (".jsonnet", ".libsonnet")
_SHOWN = 3


def add_train(commands: Commands) -> None:
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


def add_launch(commands: Commands) -> None:
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
    launch.set_defaults(run=_launch)


def _launch(arguments: argparse.Namespace) -> int:
    from retouch.distributed.launching import launch
    from retouch.recipe.recipe import load
    from retouch.records import files

    argv = [word for word in arguments.argv if word != "--fresh"]
    if not argv:
        raise ValueError("nothing to launch: add a recipe, for example `retouch launch --nproc 2 recipes/quickstart.jsonnet`")
    if argv[0] not in _LAUNCHABLE:
        argv = ["train", *argv]
    command = arguments.build_parser(argv).parse_args(argv)
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


def add_eval(commands: Commands) -> None:
    evaluate = commands.add_parser(
        "eval",
        parents=[debug_option(), set_option(), import_option()],
        help="evaluate a run, or a recipe's untrained policy, on held-out tasks",
    )
    evaluate.add_argument("target", metavar="RECIPE_OR_RUN", help=TARGET_HELP)
    evaluate.add_argument(
        "--data", metavar="PATH", help="evaluate on all rows of this data set (path or Hub id) instead; test sets are allowed"
    )
    evaluate.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from retouch.inference.opening import evaluate_target

    print(json.dumps(called(evaluate_target, arguments), indent=2))
    return 0


def add_sample(commands: Commands) -> None:
    sample = commands.add_parser(
        "sample", parents=[debug_option(), set_option(), import_option()], help="generate or edit images with a policy"
    )
    sample.add_argument("target", metavar="RECIPE_OR_RUN", help=TARGET_HELP)
    instructions = sample.add_mutually_exclusive_group(required=True)
    instructions.add_argument("--instruction", type=utf8, help="what to generate or to change")
    instructions.add_argument(
        "--instructions",
        type=Path,
        metavar="FILE",
        help=".txt with one instruction per line, or .jsonl with instructions and images",
    )
    sample.add_argument("--image", type=Path, metavar="IN.png", help="source image for --instruction")
    sample.add_argument("--mask", type=Path, metavar="MASK.png", help="mask of the region to edit, for --instruction")
    sample.add_argument("--reference", type=Path, metavar="REF.png", help="reference image for --instruction")
    sample.add_argument(
        "--context",
        choices=("reference",),
        help="'reference': the model also sees the reference image above the source image (inpainting models)",
    )
    sample.add_argument(
        "--out", type=Path, required=True, metavar="OUT", help="file for the image; with --instructions, a new folder"
    )
    sample.add_argument("--seed", type=int, default=0)
    sample.add_argument(
        "--scores", action="store_true", help="with --instructions: score each image with the recipe's reward, and print a table"
    )
    sample.set_defaults(run=_sample)


def _sample(arguments: argparse.Namespace) -> int:
    if arguments.instructions is not None and (arguments.image or arguments.mask or arguments.reference):
        raise ValueError("--image, --mask and --reference need --instruction; a .jsonl file names the images of each line")
    if arguments.instructions is None and arguments.scores:
        raise ValueError("--scores needs --instructions; for one image, use `retouch score`")
    if arguments.instructions is not None and not arguments.instructions.is_file():
        raise ValueError(f"--instructions {arguments.instructions}: no such file")
    from retouch.inference.sampling import sample_list, sample_target

    if arguments.instructions is not None:
        made = called(sample_list, arguments)
        for each in made if arguments.scores else ():
            print(each.task.instruction, *([] if each.text is None else [f"  {each.text}"]), sep="\n")
            print("  " + "  ".join(f"{name} {value:.4f}" for name, value in each.scores.items()))
        print(f"{len(made)} images in {arguments.out}")
    else:
        made = [called(sample_target, arguments)]
        if made[0].text is not None:
            print(made[0].text)
        print(f"image in {arguments.out}", file=sys.stderr)
    if fallbacks := sum(each.fell_back for each in made):
        print(
            f"{fallbacks} of {len(made)} images were made from the instruction itself, because the completion cannot be rendered",
            file=sys.stderr,
        )
    return 0


def add_score(commands: Commands) -> None:
    score = commands.add_parser("score", parents=[debug_option(), import_option()], help="score an image with one reward")
    score.add_argument(
        "reward",
        metavar="REWARD",
        help="ocr, clip:FOLDER, photos:red, package.module:Class, ...; a reward section (JSON or its file), a recipe, or a run",
    )
    score.add_argument("--image", type=Path, required=True, metavar="OUT.png", help="the image to score")
    score.add_argument(
        "--source", dest="sources", type=Path, action="append", default=[], metavar="IN.png", help="the source image of the edit"
    )
    score.add_argument("--mask", type=Path, metavar="MASK.png", help="mask of the task: white is the region to change")
    score.add_argument("--reference", type=Path, metavar="REF.png", help="the reference image of the task")
    score.add_argument("--target", type=Path, metavar="TARGET.png", help="the target image of the task")
    score.add_argument("--instruction", default="", help="the instruction of the task")
    score.add_argument("--text", help="the text that the image should contain")
    score.add_argument("--completion", metavar="TEXT", help="the completion that a policy wrote for the image")
    score.add_argument("--meta", metavar="JSON", help="the task's metadata for the judge")
    score.add_argument("--json", action="store_true", help="print one line of JSON")
    score.set_defaults(run=_score)


def _score(arguments: argparse.Namespace) -> int:
    from retouch.inference.image_scores import score_files

    scored = called(score_files, arguments)
    print(scored.to_json() if arguments.json else scored)
    return 1 if scored.missing else 0


def add_export(commands: Commands) -> None:
    export = commands.add_parser(
        "export", parents=[debug_option(), import_option()], help="write a run's weights for diffusers, PEFT and ComfyUI"
    )
    export.add_argument("target", type=run_folder, metavar="RUN", help=RUN_HELP)
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument(
        "--weights",
        dest="which",
        choices=("average", "current"),
        help="which weights to write (default: average, if the run has them)",
    )
    export.add_argument(
        "--format",
        choices=("diffusers", "peft", "comfyui", "all"),
        default="all",
        help="format of a LoRA (default: all formats that exist for it)",
    )
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from retouch.inference.exporting import export_target

    for path in called(export_target, arguments):
        print(path)
    return 0


def add_convert(commands: Commands) -> None:
    convert = commands.add_parser(
        "convert",
        parents=[debug_option()],
        help="make another trainer's file usable: a published IP-Adapter (.bin), or a configuration of EARL (.jsonnet)",
    )
    convert.add_argument(
        "source",
        type=Path,
        metavar="FILE",
        help="ip-adapter.bin or calligrapher.bin, of which only the tensors are read; or a configuration, to print it as a recipe",
    )
    convert.add_argument("--to", type=Path, metavar="DIR", help="folder for ip_adapter.safetensors")
    convert.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.source.suffix in (".jsonnet", ".json"):
        if arguments.to is not None:
            raise ValueError("--to: a recipe is printed; write `retouch tools convert FILE > RECIPE.json`")
        from retouch.recipe.recipe import load

        print(json.dumps(load(arguments.source).document(), indent=2))
        return 0
    if arguments.to is None:
        raise ValueError("--to: missing; name a folder for ip_adapter.safetensors")
    from retouch.inference.exporting import convert_adapter

    print(called(convert_adapter, arguments))
    return 0


def add_recipes(commands: Commands) -> None:
    recipes = commands.add_parser("recipes", parents=[debug_option()], help="list the packaged recipes, or describe one")
    recipes.add_argument(
        "name", nargs="?", metavar="NAME", help="part of a name, to filter the list; or a full name, to describe the recipe"
    )
    recipes.set_defaults(run=_recipes)


def _recipes(arguments: argparse.Namespace) -> int:
    wanted = (arguments.name or "").removeprefix("recipes/").removesuffix(".jsonnet")
    found = [each for each in summaries() if wanted in each.name]
    exact = [each for each in found if each.name == wanted]
    if not found:
        near = near_names(wanted)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{arguments.name}: no packaged recipe has this name{meant}")
    listed = exact or [each for each in found if not each.name.endswith(TWIN)] or found
    listed.sort(key=lambda each: (GOALS.index(each.goal), each.gpus == 0, each.gpus, each.name))
    heads = ("name", "trains", "reward", "made for", "twin")
    rows = [
        (each.name, each.trains, " + ".join(each.rewards), each.hardware, "" if each.twin is None else f"...{TWIN}")
        for each in listed
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    head, *lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (heads, *rows)
    ]
    print(head)
    for goal, some in groupby(zip(listed, lines, strict=True), key=lambda pair: pair[0].goal):
        print(f"\n{goal}", *(line for _, line in some), sep="\n")
    if exact:
        words = re.sub(r"\brecipes/([\w/-]+)\.jsonnet", r"\1", header(find(wanted)))  # a name works in any folder, a path does not
        print(f"\n{words}\n\nsteps: {exact[0].steps}\nfile: {find(wanted)}")
        return 0
    print(
        f"\nA twin, NAME{TWIN}, is the same recipe with tiny playground models, for a CPU.\n"
        "A recipe for one GPU of several sizes has values for each: --set card=24gb.\n"
        "`retouch recipes NAME` describes a recipe, `retouch train NAME` runs it, `retouch doctor NAME` plans its memory."
    )
    return 0


def add_data(commands: Commands) -> None:
    """``retouch data check``, ``data convert`` and ``data tokenize``."""
    data = commands.add_parser("data", help="data sets").add_subparsers(dest="what", required=True, metavar="WHAT")
    check = data.add_parser(
        "check",
        parents=[debug_option(), set_option(), import_option()],
        help="read a data set as training does, and list its problems",
    )
    check.add_argument(
        "path", metavar="PATH_OR_RECIPE", help="a data set; or a recipe, to check its data sets with its column settings"
    )
    check.add_argument(
        "--all", action="store_true", help=f"list every problem; the default lists only {_SHOWN} of similar problems"
    )
    check.set_defaults(run=_data_check)
    convert = data.add_parser(
        "convert", parents=[debug_option()], help="convert a published data set to a folder or prompt lists that training can read"
    )
    convert.add_argument("name", metavar="NAME", help="gpt-image-edit, aurora, omniedit or magicbrush; mmmg writes prompt lists")
    convert.add_argument("source", type=Path, metavar="SOURCE", help="folder of the downloaded data set")
    convert.add_argument("--out", type=Path, metavar="DIR", help="folder for the images of parquet files, or for the prompt lists")
    convert.add_argument("--split", default="train", help="split to convert (default: train); test splits are refused")
    convert.add_argument(
        "--stages", type=int, default=5, metavar="N", help="for mmmg: number of prompt lists, from easy to hard (default: 5)"
    )
    convert.set_defaults(run=_data_convert)
    tokens = data.add_parser(
        "tokenize", parents=[debug_option(), import_option()], help="encode the images of a data set as image tokens"
    )
    tokens.add_argument("source", metavar="SOURCE", help="a folder or data set, a data section (JSON or its file), or a recipe")
    tokens.add_argument("--model", required=True, metavar="PATH", help="folder or Hub id of the autoencoder, or playground")
    tokens.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for feature/ and list/")
    tokens.add_argument(
        "--size",
        type=positive,
        nargs=2,
        default=[256, 256],
        metavar=("H", "W"),
        help="height and width of every image (default: 256 256)",
    )
    tokens.add_argument("--batch", type=int, default=8, metavar="N", help="number of images encoded at once")
    tokens.add_argument("--device", default="auto", help="auto assigns the GPUs to the processes in turn")
    tokens.add_argument("--pictures", action="store_true", help="store the images with the codes, for judges and reports")
    tokens.add_argument("--skip", action="store_true", help="skip rows that cannot be used instead of stopping")
    parallel = tokens.add_mutually_exclusive_group()
    parallel.add_argument("--processes", type=int, default=1, metavar="N", help="number of processes on this machine")
    parallel.add_argument("--shard", type=_shard, metavar="K/N", help="encode only the K-th of N shards (from 0), on any machine")
    tokens.set_defaults(run=_data_tokenize)


def _shard(text: str) -> tuple[int, int]:
    shard, _, of = text.partition("/")
    if not (shard.isdecimal() and of.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1, for example 0/4")
    return int(shard), int(of)


def _data_check(arguments: argparse.Namespace) -> int:
    from retouch.data.kinds import check

    failed = False
    for name, places, rows, resize in _data_sets(arguments):
        problems = check(rows, resize=resize)
        for line in map(str, problems) if arguments.all else _folded(problems):
            print(line)
        errors = sum(problem.severity == "error" for problem in problems)
        failed |= errors > 0
        print(f"{name}: {len(rows)} rows read, {errors} errors, {len(problems) - errors} notes")
        for found in find_test_sets(places):
            print(f"{found}, a test set: for `retouch eval` and `retouch bench`; training on it needs data.allow_test_sets")
    return 1 if failed else 0


def _data_sets(arguments: argparse.Namespace) -> "Iterator[tuple[str, tuple[str, ...], Rows, tuple[int, int] | None]]":
    """Yield the name, the paths, the rows and the resizing of the data set at a path, or of each data set of a recipe."""
    from retouch.data.kinds import DATA, read_path

    if Path(arguments.path).exists() and not arguments.path.endswith(_RECIPES):
        from retouch.recipe.document import apply

        kind = "folder" if Path(arguments.path).is_dir() else "prompts"
        keys = apply({"data": {"kind": kind, "path": arguments.path}}, arguments.overrides)
        if keys.keys() != {"data"}:
            raise ValueError(
                "--set: here only keys of data, such as data.columns.instruction=NAME; give the recipe to change others"
            )
        section: Any = DATA.load(kind)
        rows = section(**keys["data"]).rows(seed=0) if arguments.overrides else read_path(arguments.path)
        yield arguments.path, (arguments.path,), rows, None
        return
    if not arguments.path.endswith(_RECIPES) and not is_recipe(arguments.path):
        raise ValueError(f"{arguments.path}: no such file or folder, and no packaged recipe has this name")
    from retouch.data.base import StoredData, resize_to
    from retouch.data.rows import MappedRows
    from retouch.recipe.recipe import load
    from retouch.run.build import required_rows

    recipe = load(arguments.path, arguments.overrides)
    seen = []
    for phase in recipe.resolved_phases():
        if phase.data in seen:
            continue
        seen.append(phase.data)
        places = tuple(phase.data.paths())
        name = ", ".join(places) or phase.data.label
        if isinstance(phase.data, StoredData):
            rows = MappedRows(phase.data.rows(seed=recipe.seed), required_rows(recipe, phase.data).checked)
            yield name, places, rows, resize_to(phase.data.image_size or recipe.image_size)
        elif (stored := getattr(phase.data, "rows", None)) is not None:  # image tokens, which no model resizes
            yield name, places, stored(), None
        else:
            print(f"{name}: {phase.data.label} data have no stored rows to check; use `retouch doctor`")


def _folded(problems: "list[Problem]") -> Iterator[str]:
    """Yield the problems as lines. Of problems that differ only in names and numbers, only the first ``_SHOWN`` and the number of
    the others are shown."""
    groups: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        alike = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "...", problem.what)
        groups.setdefault((problem.file, problem.severity, alike), []).append(problem)
    for (file, severity, _), alike_problems in groups.items():
        yield from map(str, alike_problems[:_SHOWN])
        if (more := len(alike_problems) - _SHOWN) > 0:
            last = alike_problems[-1].line
            yield f"{file}: and {more} more {severity}s like this one, the last in line {last}; --all lists them"


def _data_convert(arguments: argparse.Namespace) -> int:
    if arguments.name == "mmmg" and arguments.out is None:
        raise ValueError("mmmg: give a folder for the prompt lists with --out")
    from retouch.data.sources.conversion import convert, write_curriculum

    print(called(write_curriculum if arguments.name == "mmmg" else convert, arguments))
    return 0


def _data_tokenize(arguments: argparse.Namespace) -> int:
    tokenizing = wings.load("part.tokenizing")
    arguments.size = tuple(arguments.size)
    job = called(tokenizing.Job, arguments)
    shard, of = arguments.shard or (0, 1)
    found = (
        tokenizing.tokenize_shard(job, shard, of=of) if arguments.shard else tokenizing.tokenize(job, processes=arguments.processes)
    )
    print(f"shard {shard} of {of} is done; the list is written when all shards are done" if found is None else found)
    return 0
