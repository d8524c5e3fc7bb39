"""``retouch data check`` and ``retouch data tokenize``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option


def add_data(commands: Commands) -> None:
    """Add both commands."""
    data = commands.add_parser("data", help="data sets").add_subparsers(dest="what", required=True, metavar="WHAT")
    check = data.add_parser("check", parents=[debug_option()], help="read a data set as training would, and list its problems")
    check.add_argument("path", metavar="PATH")
    check.set_defaults(run=_data_check)
    tokens = data.add_parser(
        "tokenize", parents=[debug_option(), import_option()], help="encode the images of a data set as image tokens"
    )
    tokens.add_argument("source", metavar="SOURCE", help="a folder or data set, a data section (JSON or its file), or a recipe")
    tokens.add_argument("--model", required=True, metavar="PATH", help="folder or id of the autoencoder, or playground")
    tokens.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for feature/ and list/")
    tokens.add_argument("--size", type=int, nargs=2, default=[256, 256], metavar=("H", "W"), help="of every image; 256 256")
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

    problems = check(arguments.path)
    for problem in problems:
        print(problem)
    errors = sum(problem.severity == "error" for problem in problems)
    print(f"{arguments.path}: {errors} errors, {len(problems) - errors} notes")
    return 1 if errors else 0


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
    print(f"shard {shard} of {of} is done; the list is written when all shards are" if found is None else found)
    return 0


def _shard(text: str) -> tuple[int, int]:
    shard, _, of = text.partition("/")
    return int(shard), int(of)
