"""``retouch tools playground``."""

import argparse
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option

_BASES = {
    "editor": ("editor", "build_editor", None),
    "large": (
        "editor",
        "build_large_editor",
        "build an editor of four times the depth, initialized from the editor, in runs/playground/editor-large",
    ),
    "writer": ("writer", "build_writer", "build only the writer, for the existing editor"),
    "text-to-image": (
        "text_to_image",
        "build_text_to_image",
        "build the text-to-image model, initialized from the editor, and its prompt enhancer",
    ),
    "emu3": ("emu3", "build_emu3", "build the editors that generate image tokens, and their autoencoder"),
    "words": ("words", "build_words", "build the text-to-image model that renders words, and its autoencoder"),
}
"""The module of ``retouch_worlds.pretraining`` and the function that builds each base, and the help of its option."""


def add_playground(commands: Commands) -> None:
    build = commands.add_parser("playground", parents=[debug_option()], help="train the base models of the playground again")
    build.add_argument("--out", type=Path, metavar="DIR", help="folder for the weights (default: the folder of the package)")
    build.add_argument("--seed", type=int, default=0)
    which = build.add_mutually_exclusive_group()
    for base, (_, _, description) in _BASES.items():
        if description is not None:
            which.add_argument(f"--{base}", dest="base", action="store_const", const=base, help=description)
    build.set_defaults(run=_playground_build, base="editor")


def _playground_build(arguments: argparse.Namespace) -> int:
    module, function, _ = _BASES[arguments.base]
    build: Callable[..., object] = getattr(import_module(f"retouch_worlds.pretraining.{module}"), function)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    logging.getLogger("retouch").setLevel(logging.INFO)
    build(arguments.out, seed=arguments.seed)
    return 0
