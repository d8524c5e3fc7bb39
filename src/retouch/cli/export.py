"""``retouch export``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option


def add_export(commands: Commands) -> None:
    """Add the command."""
    export = commands.add_parser(
        "export", parents=[debug_option(), import_option()], help="write a run's weights for diffusers, PEFT and ComfyUI"
    )
    export.add_argument("target", metavar="RUN")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--weights", choices=("average", "current"), help="the default is average, if the run has one")
    export.add_argument(
        "--format", choices=("diffusers", "peft", "comfyui", "all"), default="all", help="of a LoRA; the default is all that exist"
    )
    export.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from retouch.inference.exporting import export_target

    for path in export_target(arguments.target, to=arguments.to, which=arguments.weights, format=arguments.format):
        print(path)
    return 0
