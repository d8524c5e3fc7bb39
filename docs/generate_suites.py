"""Writes docs/suites.md, the published benchmarks, from their classes: `python docs/generate_suites.py`."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from retouch_bench.kinds import SUITES
from retouch_bench.suite import Suite
from retouch_bench.suites.rows import RowSuite

PAGE = Path(__file__).parent / "suites.md"
_INTRODUCTION = """# Suites

`python docs/generate_suites.py` makes this page from the classes of the suites, and a test compares the two. A suite is a published
benchmark: it reads the published files, and scores and averages by the published formula. No data of a suite are part of this
package, and training on them is refused unless the recipe sets `data.allow_test_sets`.

**What is ours.** The prompts for judges are our own wording of the published criteria, with the published scales; no published
prompt is copied. So a number from here compares with other numbers from here that have the same judge. It compares with a published
number only where a suite asks no judge, and uses the published model. Each suite lists how it differs from what was published.

**What is missing stays missing.** A row that cannot be used is named, with the reason, and counted. An image without an answer has
no score; it is never 0, and the table says how many there are.

**Tests.** Each suite is tested on a few rows of exactly the published columns, against the published formula computed by hand, with
broken rows and missing answers. The published files themselves could not be downloaded where the tests run.

**Other packages.** [EvalScope](https://github.com/modelscope/evalscope) 1.14 (Apache-2.0) scores GEdit-Bench with VIEScore's
published prompts, and also takes sqrt(SC x PQ); on lists of prompts it runs PickScore and HPSv2, too. It has none of the other
suites of this page. It is no dependency, because it requires some thirty packages, among them litellm and modelscope, and asks its
judge without our ledger, budget and intervals. Use it where a number for GEdit-Bench must come from the published wording, and say
that it does.

**Weights.** The wheel of `lpips` 0.1.4 contains the linear layers of LPIPS (6 kB for AlexNet), as pickles, but not AlexNet, which
it downloads. So no wheel has all of LPIPS, and the tests of its formula use weights of their own. RapidOCR's wheel has its models.
"""


def page() -> str:
    """The whole page."""
    suites = [(name, SUITES.load(name)) for name in SUITES if name not in ("import", "playground", "prompts", "edits")]
    found = [(name, suite) for name, suite in suites if suite is not None]
    lines = [_INTRODUCTION]
    for task, title in (("editing", "Editing"), ("text-to-image", "Text to image")):
        own = [(name, suite) for name, suite in found if suite.task == task]
        lines += [f"## {title}", "", "| suite | title | items | images | scores | headline | licence of the data |"]
        lines += ["| --- | --- | ---: | ---: | --- | --- | --- |", *map(_row, own), ""]
        for name, suite in own:
            lines += [*_section(name, suite), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(named: tuple[str, type[Suite]]) -> str:
    name, suite = named
    scores = ", ".join(f"`{column}`" for column in suite.columns)
    size = suite.size or "-"
    link = f"[`{name}`](#{name})"
    return f"| {link} | {suite.title} | {size} | {suite.images_per_item} | {scores} | `{suite.headline_column}` | {suite.licence} |"


def _section(name: str, suite: type[Suite]) -> Iterator[str]:
    yield f"### `{name}`"
    yield ""
    yield from _paragraph(f"{(suite.__doc__ or '').partition(chr(10) * 2)[0]} Source: <{suite.source}>. {suite.protocol}")
    if issubclass(suite, RowSuite):
        yield from _paragraph(f"Data: {suite.layout}.")
    if suite.model_fields:
        yield from ["| option | default | |", "| --- | --- | --- |"]
        for key, field in suite.model_fields.items():
            default = "required" if field.is_required() else f"`{field.default!r}`"
            yield f"| `{key}` | {default} | {_plain(field.description or '')} |"
        yield ""
    if suite.deviations:
        yield "Known differences from what was published:"
        yield ""
        for each in suite.deviations:
            yield textwrap.fill(
                each, 128, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )


def _plain(text: str) -> str:
    """One line, with Markdown's marks of code."""
    return " ".join(text.replace("``", "`").split())


def _paragraph(text: str) -> Iterator[str]:
    yield _wrapped(_plain(text))
    yield ""


def _wrapped(text: str, **indents: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False, **indents)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
