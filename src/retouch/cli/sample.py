"""``retouch sample``."""

import argparse
import sys
from pathlib import Path

from retouch.cli.arguments import TARGET_HELP, Commands, debug_option, import_option, set_option, utf8


def add_sample(commands: Commands) -> None:
    """Add the command."""
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
    sample.set_defaults(run=_sample)


def _sample(arguments: argparse.Namespace) -> int:
    if arguments.instructions is not None and (arguments.image or arguments.mask or arguments.reference):
        raise ValueError("--image, --mask and --reference need --instruction; a .jsonl file names the images of each line")
    if arguments.instructions is not None and not arguments.instructions.is_file():
        raise ValueError(f"--instructions {arguments.instructions}: no such file")
    from retouch.inference.sampling import sample_list, sample_target

    if arguments.instructions is not None:
        made = sample_list(
            arguments.target,
            instructions=arguments.instructions,
            context=arguments.context,
            out=arguments.out,
            seed=arguments.seed,
            overrides=arguments.overrides,
        )
        print(f"{len(made)} images in {arguments.out}")
    else:
        one = sample_target(
            arguments.target,
            instruction=arguments.instruction,
            image=arguments.image,
            mask=arguments.mask,
            reference=arguments.reference,
            context=arguments.context,
            out=arguments.out,
            seed=arguments.seed,
            overrides=arguments.overrides,
        )
        made = [one]
        if one.text is not None:
            print(one.text)
        print(f"image in {arguments.out}", file=sys.stderr)
    if fallbacks := sum(each.fell_back for each in made):
        print(
            f"{fallbacks} of {len(made)} images were made from the instruction itself, because the completion cannot be rendered",
            file=sys.stderr,
        )
    return 0
