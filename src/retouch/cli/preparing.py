"""What runs are made from: ``retouch playground build``, ``data check`` and ``data tokenize``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from retouch.cli.parsing import Commands

_BASES = {
    "writer": "the writer in front of the editor that is there, and not the editor",
    "painter": "the painter, which goes on from the editor, and its enhancer",
    "emu3": "the editors of image tokens and their autoencoder",
    "words": "the painter of words and its autoencoder",
}


def add_preparing(commands: Commands, debug: argparse.ArgumentParser) -> None:
    """Add these three."""
    playground = commands.add_parser("playground", help="the built-in world").add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )
    build = playground.add_parser("build", parents=[debug], help="train the base models of the playground again")
    build.add_argument("--out", type=Path, metavar="DIR", help="folder for the weights; by default that of the package")
    build.add_argument("--seed", type=int, default=0)
    which = build.add_mutually_exclusive_group()
    for base, told in _BASES.items():
        which.add_argument(f"--{base}", dest="base", action="store_const", const=base, help=told)
    build.set_defaults(run=_playground_build, base="editor")

    data = commands.add_parser("data", help="data sets").add_subparsers(dest="what", required=True, metavar="WHAT")
    check = data.add_parser("check", parents=[debug], help="read a data set as training would, and list what is wrong with it")
    check.add_argument("path", metavar="PATH")
    check.set_defaults(run=_data_check)
    tokens = data.add_parser("tokenize", parents=[debug], help="encode the pictures of a data set as image tokens, once")
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


def _playground_build(arguments: argparse.Namespace) -> int:
    build: Callable[..., object]
    match arguments.base:
        case "writer":
            from retouch.pretraining.build_writer import build_writer

            build = build_writer
        case "painter":
            from retouch.pretraining.build_painter import build_painter

            build = build_painter
        case "emu3":
            from retouch.pretraining.build_emu3 import build_emu3

            build = build_emu3
        case "words":
            from retouch.pretraining.build_words import build_words

            build = build_words
        case _:
            from retouch.pretraining.build import build as build_editor

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
    print(f"shard {shard} of {of} is done; the list is made when all are" if found is None else found)
    return 0


def _shard(text: str) -> tuple[int, int]:
    shard, _, of = text.partition("/")
    return int(shard), int(of)
