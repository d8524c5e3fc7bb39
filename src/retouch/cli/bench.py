"""``retouch bench``: published benchmarks of any model, and comparisons of two results."""

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
        return _list()
    if arguments.suite == "compare":
        return _compare(arguments)
    if arguments.results:
        raise ValueError(f"{arguments.results[0]}: only `retouch bench compare` takes results; name a model with --model")
    from retouch.benchmarks.running import run

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


def _list() -> int:
    from retouch.benchmarks.kinds import all_suites

    for suite in all_suites():
        size = suite.size or "-"
        print(f"{suite.name:<18} {suite.task:<14} {size:>5} items  {suite.title}; {suite.source}; {suite.licence}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    if len(arguments.results) != 2:
        raise ValueError("retouch bench compare A B: give two folders of results")
    from retouch.benchmarks.comparison import compare

    first, second = arguments.results
    comparison = compare(first, second, name=arguments.name, out=arguments.out, top=arguments.top)
    print(json.dumps(comparison.about, indent=2) if arguments.json else comparison)
    if not arguments.json:
        print(f"\n{comparison.page}")
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
