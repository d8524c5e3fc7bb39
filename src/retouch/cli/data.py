"""``retouch data check``, ``retouch data convert`` and ``retouch data tokenize``."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.cli.arguments import Commands, debug_option, import_option, positive, set_option

if TYPE_CHECKING:
    from retouch.data.images import Resize
    from retouch.data.rows import Problem, Rows

_SHOWN = 3
_RECIPES = (".jsonnet", ".libsonnet")


def add_data(commands: Commands) -> None:
    """Add the three commands."""
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


def _data_check(arguments: argparse.Namespace) -> int:
    from retouch.data.check import check
    from retouch.data.guard import find_test_sets

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


def _data_sets(arguments: argparse.Namespace) -> "Iterator[tuple[str, tuple[str, ...], Rows, Resize | None]]":
    """Yield the name, the paths, the rows and the resizing of the data set at a path, or of each data set of a recipe. Raises
    ValueError if they cannot be read."""
    from retouch.config.packaged import is_recipe
    from retouch.data.check import read_path

    if Path(arguments.path).exists() and not arguments.path.endswith(_RECIPES):
        if arguments.overrides:
            raise ValueError("--set changes a recipe; give the recipe instead of the data set: retouch data check RECIPE --set ...")
        yield arguments.path, (arguments.path,), read_path(arguments.path), None
        return
    if not arguments.path.endswith(_RECIPES) and not is_recipe(arguments.path):
        raise ValueError(f"{arguments.path}: no such file or folder, and no packaged recipe has this name")
    from retouch.data.base import StoredData, resize_to
    from retouch.data.requirements import RequiredRows
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
            rows = RequiredRows(phase.data.rows(seed=recipe.seed), required_rows(recipe, phase.data))
            yield name, places, rows, resize_to(phase.data.image_size or recipe.image_size)
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
    if arguments.name == "mmmg":
        from retouch.data.sources.mmmg import write_curriculum

        if arguments.out is None:
            raise ValueError("mmmg: give a folder for the prompt lists with --out")
        print(write_curriculum(arguments.source, out=arguments.out, stages=arguments.stages))
        return 0
    from retouch.data.sources.conversion import convert

    print(convert(arguments.name, arguments.source, out=arguments.out, split=arguments.split))
    return 0


def _data_tokenize(arguments: argparse.Namespace) -> int:
    from retouch.inference.tokenizing import Job, tokenize, tokenize_shard

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
    print(f"shard {shard} of {of} is done; the list is written when all shards are done" if found is None else found)
    return 0


def _shard(text: str) -> tuple[int, int]:
    shard, _, of = text.partition("/")
    if not (shard.isdecimal() and of.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1, for example 0/4")
    return int(shard), int(of)
