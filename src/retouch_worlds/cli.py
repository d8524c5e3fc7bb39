"""``retouch playground build``."""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option

_BASES = {
    "large": "build an editor of four times the depth, initialized from the editor, in runs/playground/editor-large",
    "writer": "build only the writer, for the existing editor",
    "text-to-image": "build the text-to-image model, initialized from the editor, and its prompt enhancer",
    "emu3": "build the editors that generate image tokens, and their autoencoder",
    "words": "build the text-to-image model that renders words, and its autoencoder",
}


def add_playground(commands: Commands) -> None:
    """Add the command."""
    playground = commands.add_parser("playground", help="the built-in toy world").add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )
    build = playground.add_parser("build", parents=[debug_option()], help="train the base models of the playground again")
    build.add_argument("--out", type=Path, metavar="DIR", help="folder for the weights (default: the folder of the package)")
    build.add_argument("--seed", type=int, default=0)
    which = build.add_mutually_exclusive_group()
    for base, description in _BASES.items():
        which.add_argument(f"--{base}", dest="base", action="store_const", const=base, help=description)
    build.set_defaults(run=_playground_build, base="editor")


def _playground_build(arguments: argparse.Namespace) -> int:
    build: Callable[..., object]
    match arguments.base:
        case "large":
            from retouch_worlds.pretraining.build_editor import build_large_editor

            build = build_large_editor
        case "writer":
            from retouch_worlds.pretraining.build_writer import build_writer

            build = build_writer
        case "text-to-image":
            from retouch_worlds.pretraining.build_text_to_image import build_text_to_image

            build = build_text_to_image
        case "emu3":
            from retouch_worlds.pretraining.build_emu3 import build_emu3

            build = build_emu3
        case "words":
            from retouch_worlds.pretraining.build_words import build_words

            build = build_words
        case _:
            from retouch_worlds.pretraining.build_editor import build_editor

            build = build_editor
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    logging.getLogger("retouch").setLevel(logging.INFO)
    build(arguments.out, seed=arguments.seed)
    return 0
