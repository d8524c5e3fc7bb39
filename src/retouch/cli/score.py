"""``retouch score``."""

import argparse
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option


def add_score(commands: Commands) -> None:
    """Add the command."""
    score = commands.add_parser("score", parents=[debug_option(), import_option()], help="score an image with one reward")
    score.add_argument(
        "reward",
        metavar="REWARD",
        help="ocr, clip:FOLDER, photos:red, package.module:Class, ...; a reward section (JSON or its file), a recipe, or a run",
    )
    score.add_argument("--image", type=Path, required=True, metavar="OUT.png", help="the image to score")
    score.add_argument("--source", type=Path, action="append", default=[], metavar="IN.png", help="the source image of the edit")
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

    scored = score_files(
        arguments.reward,
        image=arguments.image,
        sources=arguments.source,
        mask=arguments.mask,
        reference=arguments.reference,
        target=arguments.target,
        instruction=arguments.instruction,
        text=arguments.text,
        completion=arguments.completion,
        meta=arguments.meta,
    )
    print(scored.to_json() if arguments.json else scored)
    return 1 if scored.missing else 0
