"""Runs a benchmark: generates the images, scores them, and writes the result.

``OUT/benchmark.json`` identifies the suite and the model, ``OUT/images`` contains the images, and ``OUT/scores/NAME`` contains the
rows, the table and the ledger of one scorer, so that several judges can score the same images. Existing images and scores are used
again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from retouch.distributed.ranks import Ranks, init_distributed
from retouch.records import files
from retouch.records.libraries import versions
from retouch.rewards.base import BudgetSpent, JudgeClients
from retouch.run.ledger import ledger_path
from retouch.types import Json, Task
from retouch_bench.images import ImageFolder, ImageGenerator, ImageKey, image_keys, open_generator
from retouch_bench.kinds import find_suite
from retouch_bench.results import ROWS, BenchmarkResult, ImageRow, make_table, missing_images
from retouch_bench.scoring import CountedClients, Judge, Scorer, choose_scorer, score_images, task_at
from retouch_bench.suite import BrokenItem, Suite, SuiteItem
from retouch_judge.quota import Quota
from retouch_judge.short_audit import audit_judges

ABOUT = "benchmark.json"
SCORES = "scores"
Note = Callable[[str], None]


@dataclass(frozen=True)
class Items:
    """The chosen items, each with its index in the whole suite, and the rows of the data that cannot be used. ``total``: the number
    of items in the data, also of those that are not chosen. ``data``: path of the data. ``digest``: hash of the ids and prompts of
    all items."""

    chosen: Sequence[tuple[int, SuiteItem]]
    broken: Sequence[BrokenItem]
    total: int
    data: str | None
    digest: str


def run(
    suite: str | Suite,
    *,
    model: Any = None,
    lora: str | Path | None = None,
    judge: Judge = None,
    name: str | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    images: str | Path | None = None,
    subset: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    call: Mapping[str, Any] | None = None,
    device: str = "auto",
    audit: bool = True,
    note: Note = lambda line: None,
) -> BenchmarkResult | None:
    """Run a suite, or continue it, and return the result; None on ranks other than the first.

    ``suite``: its name, or an instance of your own suite. ``model``: the folder of a run, a recipe, the folder or Hugging Face
    id of a diffusers pipeline, or a loaded pipeline. ``lora``: weights for that pipeline. ``images``: a folder of existing images,
    named by item id, instead of a model. ``judge``: a vision-language model that answers the questions of the suite, or a reward
    that replaces the protocol of the suite. ``name``: the name under which the scores are stored. ``data``: the published data of
    the suite. ``out``: the folder for the results. ``subset``: use only this number of items, drawn evenly from the categories.
    ``seed``: seed of the noise of the images. ``options``: fields of the suite. ``call``: arguments for calling a pipeline, such as
    ``num_inference_steps``. ``audit``: audit a judge briefly before images are generated; the result of the audit is stored and
    used again. ``note``: called with progress, as sentences.

    Raises ValueError if an input is missing, if ``images`` has no image of the items, if ``out`` has images of another model or
    data set, if the judge fails its audit, or if the scorer raises it; BudgetSpent if the budget of a judge is spent.

    Example::

        >>> result = retouch.benchmarks.run("playground", model="playground", subset=6, out=folder)
        >>> sorted(result.table["all"])
        ['IF', 'IP', 'PQ', 'exact', 'overall']
    """
    if (model is None) == (images is None):
        raise ValueError("give either --model, or --images with a folder of existing images")
    if images is not None and (lora is not None or call):
        raise ValueError("--lora and --call need --model; remove them, because --images gives existing images")
    found = find_suite(suite, options) if isinstance(suite, str) else suite
    scorer = choose_scorer(found, judge, name=name)
    items = choose_items(found, data, subset=subset)
    if out is None:
        given = [each for each in ((model, lora) if images is None else (images,)) if each is not None]
        words = [Path(str(each)).name if isinstance(each, str | Path) else type(each).__name__ for each in given]
        out = Path("bench") / found.name / "-".join(words)
    root = Path(out)
    folder = None if images is None else _existing_images(Path(images), found, items)
    ranks = init_distributed(device)
    quotas: dict[str, Quota] = {}
    if audit:
        audit_judges(scorer.section, ranks=ranks, clients=CountedClients(ranks.device, quotas), note=note)
    if folder is not None:
        _require_same(root, {"suite": _identity(found), "images": str(folder.root.resolve())}, ranks)
        about: dict[str, Json] = {"model": f"images in {images}"}
    else:
        maker = open_generator(model, lora=lora, call=call or {}, device=str(ranks.device), suite=found)
        _require_same(root, {"suite": _identity(found), "seed": seed, "data_set": items.digest, **maker.identity}, ranks)
        folder, about = ImageFolder(root / "images", suite=found), maker.identity
        make_images(found, maker, own_image_keys(found, items, ranks), folder, seed=seed, note=note)
    clients = CountedClients(ranks.device, quotas)
    return score(
        scorer, items, folder, root / SCORES / scorer.name, model=about, seed=seed, ranks=ranks, clients=clients, note=note
    )


def score(
    scorer: Scorer,
    items: Items,
    images: ImageFolder,
    folder: Path,
    *,
    model: Mapping[str, Json],
    seed: int,
    ranks: Ranks,
    ledger: Path | None = None,
    clients: JudgeClients | None = None,
    note: Note = lambda line: None,
) -> BenchmarkResult | None:
    """Score the images and write the result to ``folder``; None on ranks other than the first.

    ``model``: describes what generated the images. ``ledger``: the folder of the ledger; the default is ``folder``. ``clients``:
    opens the clients of judges. If the scorer raises ValueError on one rank, all ranks raise it: BudgetSpent if the budget of a
    judge is spent.
    """
    suite = scorer.suite
    folder.mkdir(parents=True, exist_ok=True)
    own = own_image_keys(suite, items, ranks)
    rows, fault = [], None
    try:
        rows = score_images(
            scorer,
            own,
            images,
            ledger=ledger_path(folder if ledger is None else ledger, ranks.rank),
            device=ranks.device,
            clients=clients,
            noted=lambda done: note(f"scored {done} of {len(own)} images"),
        )
    except ValueError as error:
        fault = error
    # Raised on every rank if scoring failed on one, so that no rank waits for the others forever.
    worst = int(ranks.max(torch.tensor(0.0 if fault is None else 2.0 if isinstance(fault, BudgetSpent) else 1.0)))
    if isinstance(fault, BudgetSpent):
        raise BudgetSpent(f"{fault}. Images and answers are kept, and the same command continues the benchmark") from fault
    if fault is not None:
        raise fault
    if worst:
        raise (BudgetSpent if worst == 2 else ValueError)("scoring failed on another rank; its log says why")
    if ranks.world > 1:
        files.write_lines(folder / f"rank{ranks.rank}.{ROWS}", [asdict(row) for row in rows])
        ranks.barrier()
        if not ranks.is_main:
            return None
        rows = [ImageRow.from_json(line) for rank in range(ranks.world) for line in files.read_lines(folder / f"rank{rank}.{ROWS}")]
        order = {item.id: number for number, item in items.chosen}
        rows.sort(key=lambda row: (row.turn, order[row.item], row.sample))
    used = [item for _, item in items.chosen]
    title = suite.title if len(used) == items.total else f"A part of {suite.title}"
    rows_given = items.total + len(items.broken)
    if suite.size and rows_given != suite.size:  # not the published items, so not the published name
        title = f"{suite.title}'s protocol on other data ({rows_given:,} items; {suite.size:,} are published)"
    about = {
        "suite": _identity(suite),
        "title": title,
        "source": suite.source,
        "licence": suite.licence,
        "size": items.total,
        "protocol": suite.protocol,
        "deviations": list(suite.deviations),
        "model": {key: value for key, value in model.items() if key != "recipe"},
        "judge": {"name": scorer.name, "own": scorer.own, "fingerprint": f"{scorer.section.name} {scorer.section.version}"},
        "seed": seed,
        "data": items.data,
        "items": len(used),
        "headline": suite.headline_column if scorer.own else next(iter(scorer.columns)),
        "lower_is_better": [name for name, column in scorer.columns.items() if not column.higher_is_better],
        "table": make_table(suite, used, rows),
        "missing": missing_images(rows, scorer.required),
        "broken": [asdict(each) for each in items.broken],
        "versions": versions(Path.cwd()),
    }
    result = BenchmarkResult(folder, about, rows, used)
    result.write()
    return result


def make_images(
    suite: Suite, maker: ImageGenerator, places: Sequence[ImageKey], folder: ImageFolder, *, seed: int, note: Note
) -> None:
    """Generate the images that are not in the folder. Each batch is written before the next one is generated.

    If the source images of an item cannot be read, or are more than the model takes, no image is generated for it, and its row in
    the result says why.
    """
    new = [place for place in places if folder.find(place) is None]
    made = 0
    turn_and_sample = attrgetter("turn", "sample", "slot")
    for _, group in groupby(sorted(new, key=turn_and_sample), key=turn_and_sample):
        same = list(group)
        for first in range(0, len(same), maker.batch):
            usable: dict[ImageKey, Task] = {}
            for place in same[first : first + maker.batch]:
                try:
                    task = task_at(suite, place, folder)
                except ValueError:
                    continue
                if 0 < maker.most_sources < (count := len(task.images)):
                    folder.explain(place, f"the item has {count} source images, and {maker.kind} takes {maker.most_sources}")
                else:
                    usable[place] = task
            batch = list(usable)
            for place, image in zip(batch, maker(batch, list(usable.values()), seed=seed) if batch else (), strict=True):
                folder.write(place, image)
            made += len(batch)
            note(f"made {made} of {len(new)} images")


def choose_items(suite: Suite, data: str | Path | None, *, subset: int | None) -> Items:
    """Return all items of the suite, or always the same ``subset`` of them, drawn as evenly from the categories as possible. Raises
    ValueError if the data are missing, have no usable item, or have two items with the same id."""
    items, broken = suite.items(None if data is None else Path(data))
    numbered, place = list(enumerate(items)), None if data is None else str(data)
    digest = hashlib.sha256(json.dumps([(item.id, item.prompt, item.later) for item in items]).encode()).hexdigest()[:16]
    if not numbered:
        raise ValueError(
            f"{suite.name}: no usable item in the data; the first of {len(broken)}: {broken[0].reason if broken else '-'}"
        )
    identity, times = Counter(item.id for item in items).most_common(1)[0]
    if times > 1:
        raise ValueError(f"{suite.name}: {times} items have the id {identity!r}")
    if subset is None or subset >= len(items):
        return Items(numbered, broken, len(items), place, digest)
    if subset < 1:
        raise ValueError(f"--subset {subset}: give at least one item")
    shuffled = list(numbered)
    random.Random(f"{suite.name} subset").shuffle(shuffled)
    seen: dict[str, int] = {}
    turn: list[tuple[int, int, int]] = []
    for number, item in shuffled:
        turn.append((seen.setdefault(item.category, 0), len(turn), number))
        seen[item.category] += 1
    chosen = {number for _, _, number in sorted(turn)[:subset]}
    return Items([(number, item) for number, item in numbered if number in chosen], broken, len(items), place, digest)


def _existing_images(root: Path, suite: Suite, items: Items) -> ImageFolder:
    """The folder of existing images. Raises ValueError if it is missing, or if it has no image of the chosen items."""
    folder = ImageFolder(root, suite=suite)
    if not root.is_dir():
        raise ValueError(f"--images {root}: no such folder")
    keys = image_keys(list(items.chosen), suite=suite)
    if all(folder.find(key) is None for key in keys):
        raise ValueError(
            f"--images {root}: no image of the {len(items.chosen)} items; name the files by the ids of the items, for example "
            f"{folder.path(keys[0]).name}"
        )
    return folder


def own_image_keys(suite: Suite, items: Items, ranks: Ranks) -> list[ImageKey]:
    """Return the images of this rank: those of every ``world``-th item, with all turns."""
    return image_keys(list(items.chosen[ranks.rank :: ranks.world]), suite=suite)


def _identity(suite: Suite) -> dict[str, Json]:
    return {"name": suite.name, **suite.model_dump(mode="json")}


def _require_same(root: Path, about: Mapping[str, Any], ranks: Ranks) -> None:
    """Write ``about``, which identifies the images, into the folder. Raises ValueError if the folder has other images."""
    files.require_plain(root)
    path = root / ABOUT
    wanted = files.jsonable(about)
    if path.is_file():
        known = {"data_set": wanted.get("data_set"), **files.read_record(path)}  # older files do not name the data set
        changed = [key for key in {**known, **wanted} if known.get(key) != wanted.get(key)]
        if changed:
            there, now = (text if len(text := repr(each.get(changed[0]))) <= 80 else f"{text[:77]}..." for each in (known, wanted))
            kind = changed[0].replace("_", " ")
            raise ValueError(f"{root} has the images of another {kind}: {there} there, {now} now; give another --out")
    ranks.barrier()
    if ranks.is_main and not path.is_file():
        root.mkdir(parents=True, exist_ok=True)
        files.write_json(path, wanted)
