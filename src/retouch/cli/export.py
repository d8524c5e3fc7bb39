"""``retouch export`` writes the weights of a run for other programs; ``retouch convert`` reads published weights for a run."""

import argparse
from pathlib import Path

from retouch.cli.arguments import RUN_HELP, Commands, debug_option, import_option, run_folder


def add_export(commands: Commands) -> None:
    """Add the command."""
    export = commands.add_parser(
        "export", parents=[debug_option(), import_option()], help="write a run's weights for diffusers, PEFT and ComfyUI"
    )
    export.add_argument("target", type=run_folder, metavar="RUN", help=RUN_HELP)
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument(
        "--weights", choices=("average", "current"), help="which weights to write (default: average, if the run has them)"
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

    for path in export_target(str(arguments.target), to=arguments.to, which=arguments.weights, format=arguments.format):
        print(path)
    return 0


def add_convert(commands: Commands) -> None:
    """Add the command."""
    convert = commands.add_parser(
        "convert", parents=[debug_option()], help="make a published IP-Adapter (.bin) usable as policy.train.init_from"
    )
    convert.add_argument("file", type=Path, metavar="FILE", help="ip-adapter.bin or calligrapher.bin; only its tensors are read")
    convert.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder for ip_adapter.safetensors")
    convert.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from retouch.inference.published_adapters import convert_adapter

    print(convert_adapter(arguments.file, to=arguments.to))
    return 0
