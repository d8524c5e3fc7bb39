"""What uses a policy or a reward that is there: ``retouch eval``, ``sample``, ``score`` and ``export``."""

import argparse
import json
import sys
from pathlib import Path

from retouch.cli.parsing import Commands


def add_using(commands: Commands, debug: argparse.ArgumentParser, changes: argparse.ArgumentParser) -> None:
    """Add these four."""
    evaluate = commands.add_parser(
        "eval", parents=[debug, changes], help="judge a run, or a recipe's untrained policy, on held-out tasks"
    )
    evaluate.add_argument("target", metavar="RECIPE_OR_RUN")
    evaluate.set_defaults(run=_eval)

    sample = commands.add_parser("sample", parents=[debug], help="use the policy as its end user would")
    sample.add_argument("target", metavar="RECIPE_OR_RUN")
    asked = sample.add_mutually_exclusive_group(required=True)
    asked.add_argument("--instruction", help="what to make or to change")
    asked.add_argument("--instructions", type=Path, metavar="FILE", help=".txt with one a line, or .jsonl with pictures too")
    sample.add_argument("--image", type=Path, metavar="IN.png", help="source picture, with --instruction")
    sample.add_argument("--mask", type=Path, metavar="MASK.png", help="where to edit, with --instruction")
    sample.add_argument("--reference", type=Path, metavar="REF.png", help="what to be like, with --instruction")
    sample.add_argument("--out", type=Path, required=True, metavar="OUT", help="the picture; with --instructions a new folder")
    sample.add_argument("--seed", type=int, default=0)
    sample.set_defaults(run=_sample)

    score = commands.add_parser("score", parents=[debug], help="judge a picture by one reward")
    score.add_argument(
        "reward",
        metavar="REWARD",
        help="ocr, clip:FOLDER, photos:red, package.module:Class, ...; a reward section (JSON or its file), a recipe, or a run",
    )
    score.add_argument("--image", type=Path, required=True, metavar="OUT.png", help="the picture to judge")
    score.add_argument("--source", type=Path, action="append", default=[], metavar="IN.png", help="what it was made from")
    score.add_argument("--mask", type=Path, metavar="MASK.png", help="white where to change")
    score.add_argument("--reference", type=Path, metavar="REF.png", help="a second picture that the task brings")
    score.add_argument("--target", type=Path, metavar="TARGET.png", help="the picture wanted")
    score.add_argument("--instruction", default="", help="what was asked for")
    score.add_argument("--text", help="what should be written in the picture")
    score.add_argument("--written", metavar="TEXT", help="what a policy wrote for it")
    score.add_argument("--meta", metavar="JSON", help="what else a judge knows of the task")
    score.add_argument("--json", action="store_true", help="one line of JSON")
    score.set_defaults(run=_score)

    export = commands.add_parser("export", parents=[debug], help="write a run's weights as diffusers and PEFT load them")
    export.add_argument("target", metavar="RUN")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--weights", choices=("average", "current"), help="average by default, where the run keeps one")
    export.set_defaults(run=_export)


def _eval(arguments: argparse.Namespace) -> int:
    from retouch.inference.evaluating import evaluate_target

    print(json.dumps(evaluate_target(arguments.target, arguments.overrides), indent=2))
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    if arguments.instructions is not None and (arguments.image or arguments.mask or arguments.reference):
        raise ValueError("--image, --mask and --reference go with --instruction; a .jsonl list names its own pictures")
    from retouch.inference.sampling import sample_list, sample_target

    if arguments.instructions is not None:
        made = sample_list(arguments.target, instructions=arguments.instructions, out=arguments.out, seed=arguments.seed)
        print(f"{len(made)} pictures in {arguments.out}")
    else:
        one = sample_target(
            arguments.target,
            instruction=arguments.instruction,
            image=arguments.image,
            mask=arguments.mask,
            reference=arguments.reference,
            out=arguments.out,
            seed=arguments.seed,
        )
        made = [one]
        if one.text is not None:
            print(one.text)
    if fallen := sum(each.fell_back for each in made):
        told = "of the instruction itself: nothing can be drawn of what was written"
        print(f"{fallen} of {len(made)} are {told}", file=sys.stderr)
    return 0


def _score(arguments: argparse.Namespace) -> int:
    from retouch.inference.scoring import score_files

    scored = score_files(
        arguments.reward,
        image=arguments.image,
        sources=arguments.source,
        mask=arguments.mask,
        reference=arguments.reference,
        target=arguments.target,
        instruction=arguments.instruction,
        text=arguments.text,
        written=arguments.written,
        meta=arguments.meta,
    )
    print(scored.to_json() if arguments.json else scored)
    return 1 if scored.missing else 0


def _export(arguments: argparse.Namespace) -> int:
    from retouch.inference.exporting import export_target

    for path in export_target(arguments.target, to=arguments.to, which=arguments.weights):
        print(path)
    return 0
