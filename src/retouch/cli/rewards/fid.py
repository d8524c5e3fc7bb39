"""``retouch fid``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option


def add_fid(commands: Commands) -> None:
    """Add the command."""
    fid = commands.add_parser(
        "fid", parents=[debug_option()], help="the Fréchet distance between two folders of images (FID or FD-DINOv2)"
    )
    fid.add_argument("images", type=Path, metavar="IMAGES", help="folder of the generated images, with its subfolders")
    fid.add_argument("references", type=Path, metavar="REFERENCES", help="folder of the images to compare with")
    network = fid.add_mutually_exclusive_group(required=True)
    network.add_argument(
        "--inception", type=Path, metavar="FILE", help="FID: the weights of pytorch-fid, converted to safetensors (docs/rewards.md)"
    )
    network.add_argument(
        "--dinov2", metavar="FOLDER", help="FD-DINOv2: folder of a DINOv2 model, or its id in the Hugging Face cache"
    )
    fid.add_argument("--json", action="store_true", help="print one line of JSON")
    fid.set_defaults(run=_fid)


def _fid(arguments: argparse.Namespace) -> int:
    from retouch.inference.image_sets import distance_of_folders

    found = distance_of_folders(arguments.images, arguments.references, inception=arguments.inception, dinov2=arguments.dinov2)
    print(found.to_json() if arguments.json else found)
    return 0
