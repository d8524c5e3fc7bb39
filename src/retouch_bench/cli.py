"""``retouch bench``, ``fid`` and ``judge``."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from retouch.cli.arguments import Commands, debug_option, import_option


def add_bench(commands: Commands) -> None:
    """Add the command. Its first argument is the name of a suite, ``compare`` or ``list``."""
    bench = commands.add_parser(
        "bench",
        parents=[debug_option(), import_option()],
        help="benchmark any model on a published suite, with 95 %% intervals; compare two results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="retouch bench list               lists the suites\n"
        "retouch bench compare A B        paired differences of two results (their --out folders), and an HTML page of the images",
    )
    bench.add_argument("suite", metavar="SUITE", help="the suite's name, `list`, or `compare`")
    bench.add_argument("results", nargs="*", type=Path, metavar="RESULT", help="for `compare`: the folders of two results")
    bench.add_argument(
        "--model",
        metavar="ID",
        help="a run (its folder, or its name in the folder runs), a recipe, or the folder or Hub id of a diffusers pipeline",
    )
    bench.add_argument(
        "--lora", metavar="PATH", help="a LoRA for that pipeline (diffusers, PEFT, kohya, ComfyUI): a file or folder"
    )
    bench.add_argument("--images", type=Path, metavar="DIR", help="existing images, named by item id, instead of a model")
    bench.add_argument(
        "--judge",
        metavar="JSON",
        help="a vision-language model that answers the suite's questions, or a reward that replaces its scores",
    )
    bench.add_argument("--data", type=Path, metavar="DIR", help="file or folder of the suite's published data")
    bench.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (default: bench/SUITE/MODEL)")
    bench.add_argument("--subset", type=int, metavar="N", help="use only N items, drawn evenly from the categories")
    bench.add_argument("--seed", type=int, default=0, help="seed of the noise from which images are generated")
    bench.add_argument(
        "--name", help="name under which the scores are stored, or which scores `compare` reads (default: name of the judge)"
    )
    bench.add_argument("--call", action="append", default=[], metavar="KEY=VALUE", help="an argument for calling the pipeline")
    bench.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="set a field of the suite")
    bench.add_argument("--device", default="auto", help="auto, cpu, mps, cuda or cuda:N")
    bench.add_argument("--top", type=int, default=24, metavar="N", help="for `compare`: number of items on the page")
    bench.add_argument("--no-audit", action="store_true", help="skip the short audit of the judge")
    bench.add_argument("--json", action="store_true", help="print the result as JSON")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.suite == "list":
        from retouch_bench.kinds import all_suites

        for suite in all_suites():
            size = suite.size or "-"
            print(f"{suite.name:<18} {suite.task:<14} {size:>5} items  {suite.title}; {suite.source}; {suite.licence}")
        return 0
    if arguments.suite == "compare":
        if len(arguments.results) != 2:
            raise ValueError("retouch bench compare A B: give two folders of results")
        from retouch_bench.comparison import compare

        first, second = arguments.results
        comparison = compare(first, second, name=arguments.name, out=arguments.out, top=arguments.top)
        print(json.dumps(comparison.about, indent=2) if arguments.json else comparison)
        if not arguments.json:
            print(f"\n{comparison.page}")
        return 0
    if arguments.results:
        raise ValueError(f"{arguments.results[0]}: only `retouch bench compare` takes results; name a model with --model")
    from retouch_bench.running import run

    result = run(
        arguments.suite,
        model=arguments.model,
        lora=arguments.lora,
        judge=arguments.judge,
        name=arguments.name,
        data=arguments.data,
        out=arguments.out,
        images=arguments.images,
        subset=arguments.subset,
        seed=arguments.seed,
        options=_pairs(arguments.option, "--option"),
        call=_pairs(arguments.call, "--call"),
        device=arguments.device,
        audit=not arguments.no_audit,
        note=lambda line: print(line, file=sys.stderr),
    )
    if result is not None:
        print(json.dumps(result.about, indent=2) if arguments.json else result)
        if not arguments.json:
            print(f"\n{result.folder}")
    return 0


def _pairs(words: list[str], option: str) -> dict[str, Any]:
    pairs = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"{option} {word}: write {option} KEY=VALUE")
        try:
            pairs[key] = json.loads(text)
        except json.JSONDecodeError:
            pairs[key] = text
    return pairs


def add_fid(commands: Commands) -> None:
    fid = commands.add_parser(
        "fid", parents=[debug_option()], help="distances between two folders of images: FID and KID, or FD-DINOv2"
    )
    fid.add_argument("images", type=Path, metavar="IMAGES", help="folder of the generated images, with its subfolders")
    fid.add_argument("references", type=Path, metavar="REFERENCES", help="folder of the images to compare with")
    network = fid.add_mutually_exclusive_group(required=True)
    network.add_argument(
        "--inception",
        type=Path,
        metavar="FILE",
        help="FID and KID: the weights of pytorch-fid, converted to safetensors (docs/rewards.md)",
    )
    network.add_argument(
        "--dinov2", metavar="FOLDER", help="FD-DINOv2 and KD-DINOv2: folder of a DINOv2 model, or its id in the Hugging Face cache"
    )
    fid.add_argument("--json", action="store_true", help="print one line of JSON")
    fid.set_defaults(run=_fid)


def _fid(arguments: argparse.Namespace) -> int:
    from retouch_bench.image_sets import distances_of_folders

    found = distances_of_folders(arguments.images, arguments.references, inception=arguments.inception, dinov2=arguments.dinov2)
    print(found.to_json() if arguments.json else found)
    return 0


def add_audit(commands: Commands) -> None:
    audit = commands.add_parser(
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
    from retouch_judge.audit import judge_audit

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
