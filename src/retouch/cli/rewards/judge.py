"""``retouch judge audit``."""

import argparse
import json
import sys
from pathlib import Path

from retouch.cli.arguments import Commands, debug_option, import_option


def add_judge(commands: Commands) -> None:
    """Add the command."""
    judge = commands.add_parser("judge", help="audit a judge").add_subparsers(dest="what", required=True, metavar="WHAT")
    audit = judge.add_parser(
        "audit",
        parents=[debug_option(), import_option()],
        help="measure the noise, the biases and the ranking of a judge on images of known quality, before a run pays for it",
    )
    audit.add_argument(
        "judge",
        metavar="JUDGE",
        help="a reward section (JSON or its file), a recipe, a run, or a reward's name as in `retouch score`",
    )
    audit.add_argument("--ladder", type=Path, metavar="DIR", help="your own images: a folder with ladder.jsonl")
    audit.add_argument("--items", type=int, metavar="N", help="number of ladders (default: 20 of the playground, or all of DIR)")
    audit.add_argument("--repeats", type=int, default=3, metavar="N", help="how often each rung of a ladder is scored (default: 3)")
    audit.add_argument("--column", metavar="NAME", help="the column to audit (default: the combination of the reward)")
    audit.add_argument(
        "--precision",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="print how many answers must be averaged for this precision, a share of the span (default: 0.05)",
    )
    audit.add_argument("--budget", type=int, metavar="N", help="maximum number of requests to each endpoint, including retries")
    audit.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for audit.json, audit.html and the ledger; an interrupted audit in it is continued",
    )
    audit.add_argument("--seed", type=int, default=0, help="seed of the playground's ladders")
    audit.add_argument("--device", help="device for models in this process (default: the GPU, if there is one)")
    audit.add_argument("--json", action="store_true", help="print JSON")
    audit.set_defaults(run=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from retouch.benchmarks.judges.audit import judge_audit

    result = judge_audit(
        arguments.judge,
        ladder=arguments.ladder,
        items=arguments.items,
        repeats=arguments.repeats,
        column=arguments.column,
        precision=arguments.precision,
        budget=arguments.budget,
        out=arguments.out,
        seed=arguments.seed,
        device=arguments.device,
        progress=_progress,
    )
    print(json.dumps(result.to_json(), indent=2) if arguments.json else result)
    return 1 if result.failed else 0


def _progress(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {of} items", end="\n" if done == of else "", file=sys.stderr, flush=True)
