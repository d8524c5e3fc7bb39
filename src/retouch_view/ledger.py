"""``retouch ledger``: the scores of a run, its judges and their cost, from the ledgers of all ranks and of later rescorings.

Everything but ``expel`` is read-only, also while the run continues. A command returns its result as JSON and as a table.
"""

import csv
import io
import json
import math
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from retouch.records.files import inside
from retouch.records.folder import RunFolder
from retouch.rewards.ledger.database import (
    UNREADABLE,
    Database,
    ImageStore,
    all_finite,
    decode_scores,
    image_hash,
    open_read_only,
    read_image,
)
from retouch_judge.models import Prices
from retouch_judge.questions import quoted_fault
from retouch_rewards import measures
from retouch_view.report.markup import aligned

RESCORED = "rescored"
RATING = "rating"  # the column of human ratings
_SAMPLES = "SELECT split, step, group_id, slot, task, picture, written, judge, scores, seconds, at FROM samples"
_TYPES = (str, int, int, int, str, str, str | None, str, str, float, float)
_CALLS_BY_JUDGE = """
SELECT judge, count(*) AS calls, sum(scores IS NULL) AS failed, sum(attempts) AS attempts, sum(fresh) AS fresh,
       sum(seconds) AS seconds, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
       sum(cost) AS cost, sum(CASE WHEN cost IS NULL THEN input_tokens ELSE 0 END) AS unpriced_input,
       sum(CASE WHEN cost IS NULL THEN output_tokens ELSE 0 END) AS unpriced_output
FROM answers GROUP BY judge
"""
_MOST_LISTED = 20

Place = tuple[str, int, int, int]
"""(split, step, group, slot)."""


@dataclass(frozen=True, slots=True, eq=False)
class LedgerSample:
    """A scored sample.

    ``step``: as in the metrics of the run: training starts at step 1; for held-out samples the number of steps before the
    evaluation. ``image``: the SHA-256 of the image, empty if the policy made none. ``judge``: the fingerprint of the reward.
    ``seconds``: the time to score the sample. ``at``: the time of the record, in seconds since 1970.
    """

    split: str
    step: int
    group: int
    slot: int
    task: str
    image: str
    completion: str | None
    judge: str
    scores: Mapping[str, float]
    seconds: float
    at: float

    @property
    def place(self) -> Place:
        return self.split, self.step, self.group, self.slot


@dataclass(frozen=True, slots=True, eq=False)
class LedgerView:
    """The content of a run's ledgers. ``files``: one for each rank, in order. ``rescored``: the files of later rescorings, by name.
    ``samples``: ordered by split, step, group and slot; a column of the rescoring NAME is called NAME:COLUMN."""

    run: Path
    files: Sequence[Path]
    rescored: Mapping[str, Path]
    samples: Sequence[LedgerSample]

    @classmethod
    def open(cls, run: Path) -> "LedgerView":
        """Read the ledgers in the folder of a run. Raises ValueError if there is none."""
        files = sorted(run.glob("ledger*.sqlite"), key=lambda path: (len(path.name), path.name))
        if not files:
            raise ValueError(f"{run} has no ledger.sqlite: give the folder of a run that has scored samples")
        rescored = {path.stem: path for path in sorted(inside(run, RESCORED).glob("*.sqlite"))}
        # After a resume with another number of ranks, two files may have a row for the same position: the later row is used.
        found: dict[Place, LedgerSample] = {}
        for sample in (sample for file in files for sample in _samples(file)):
            if sample.place not in found or found[sample.place].at < sample.at:
                found[sample.place] = sample
        for name, file in rescored.items():
            for again in _samples(file):
                first = found.get(again.place)
                if first is not None and first.image == again.image:
                    others = {f"{name}:{column}": value for column, value in again.scores.items()}
                    found[again.place] = replace(first, scores={**first.scores, **others})
        return cls(run, files, rescored, sorted(found.values(), key=lambda sample: sample.place))

    def query(self, sql: str) -> Iterator[dict[str, Any]]:
        """The rows of a query on all files, including rescorings."""
        for file in [*self.files, *self.rescored.values()]:
            with closing(open_read_only(file)) as connection:
                connection.row_factory = sqlite3.Row
                yield from (dict(row) for row in connection.execute(sql))


def _samples(file: Path) -> Iterator[LedgerSample]:
    with closing(open_read_only(file)) as connection:
        for row in connection.execute(_SAMPLES):
            if not all(map(isinstance, row, _TYPES)):
                raise ValueError(f"{file}: a value of a sample has another type; the file was changed by another program")
            split, step, group, slot, task, image, completion, judge, scores, seconds, at = row
            number = step + 1 if split == "train" else step
            yield LedgerSample(split, number, group, slot, task, image, completion, judge, decode_scores(scores), seconds, at)


def select_samples(samples: Sequence[LedgerSample], *, split: str | None, steps: tuple[int, int] | None) -> list[LedgerSample]:
    """The samples of a split (None: all) and a range of steps, both ends included (None: all)."""
    low, high = steps or (0, 2**63)
    return [sample for sample in samples if split in (None, sample.split) and low <= sample.step <= high]


class RunImages:
    """The images in the folder of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = RunFolder(run)
        self._kept = ImageStore(run)

    def path(self, sample: LedgerSample) -> Path | None:
        """The file of the sample's image; None if there is none."""
        if not sample.image:
            return None
        kept = self._kept.path(sample.image)
        return kept if kept.exists() else self._examples.get(sample.place)

    def image(self, sample: LedgerSample) -> Image.Image | None:
        """The image that was scored; None if its file is missing or contains another image."""
        path = self.path(sample)
        return None if path is None else read_image(path, sample.image)

    @cached_property
    def _examples(self) -> dict[Place, Path]:
        found = {}
        for step in self._folder.sample_steps():
            for line in self._folder.read_samples(step):
                if line["image"] is not None:
                    split = {"group": "train", "heldout": "heldout"}[line["set"]]
                    found[split, step, line["group"], line["slot"]] = inside(self._folder.samples(step), line["image"])
        return found


def overview(ledger: LedgerView, *, prices: Prices | None) -> tuple[dict[str, Any], str]:
    """What was scored, by which judges, and the cost. ``prices``: for tokens without a known price during the run. ``cost``: None
    if no price is known."""
    calls = _calls_by_judge(ledger, prices)
    costs = [each["cost"] for each in calls if each["cost"] is not None]
    since = ledger.query("SELECT fingerprint, since, about FROM judges ORDER BY number")
    judges = {row["fingerprint"]: {**row, "about": json.loads(row["about"])} for row in since}
    images = RunImages(ledger.run)
    splits = {}
    for split in dict.fromkeys(sample.split for sample in ledger.samples):
        samples = [sample for sample in ledger.samples if sample.split == split]
        with_image = [sample for sample in samples if images.path(sample) is not None]
        missing = Counter(name for sample in samples for name, value in sample.scores.items() if math.isnan(value))
        splits[split] = {
            "samples": len(samples),
            "steps": [samples[0].step, samples[-1].step],
            "without_image": sum(not sample.image for sample in samples),
            "missing": dict(sorted(missing.items())),
            "seconds": sum(sample.seconds for sample in samples),
            "stored_images": len(with_image),
            "steps_with_images": sorted({sample.step for sample in with_image}),
        }
    found = {
        "run": ledger.run.name,
        "judges": list(judges.values()),
        "samples": splits,
        "asked": calls,
        "cost": sum(costs) if costs else None,
    }
    return found, "\n".join(_overview_table(found))


def answers(ledger: LedgerView, *, failed: bool, top: int) -> tuple[list[dict[str, Any]], str]:
    """The latest ``top`` answers of judges and reward servers, with their texts. ``failed``: only those that could not be used."""
    where = "WHERE scores IS NULL" if failed else ""
    asked = f"SELECT judge, fault, scores, text, attempts, seed, picture, at FROM answers {where} ORDER BY at DESC LIMIT {top}"
    found = sorted(ledger.query(asked), key=lambda row: -row["at"])[:top]
    lines = [
        f"{row['judge']}, attempts {row['attempts']}, image {row['picture'][:12]}\n"
        f"  {quoted_fault([(row['fault'] or row['scores'], row['text'])], longest=1000)}"
        for row in found
    ]
    return found, "\n".join(lines) or ("no answer failed" if failed else "no judge or server outside the run was called")


def _calls_by_judge(ledger: LedgerView, prices: Prices | None) -> list[dict[str, Any]]:
    """The number, tokens and cost of the calls to each judge, over all files."""
    totals: dict[str, Counter[str]] = {}
    priced: set[str] = set()
    for row in ledger.query(_CALLS_BY_JUDGE):
        judge = row.pop("judge")
        if row["cost"] is None:
            row["cost"] = 0.0
        else:
            priced.add(judge)
        totals.setdefault(judge, Counter()).update(row)
    listed = []
    for judge, total in totals.items():
        unpriced = {"input_tokens": total.pop("unpriced_input"), "output_tokens": total.pop("unpriced_output")}
        added = 0.0 if prices is None else prices.cost(**unpriced)
        known = judge in priced or (prices is not None and any(unpriced.values()))
        listed.append({"judge": judge, **total, "cost": total["cost"] + added if known else None})
    return listed


def _overview_table(found: Mapping[str, Any]) -> Iterator[str]:
    def money(cost: float | None) -> str:
        return "unknown" if cost is None else f"{cost:.2f}" if cost >= 1 else f"{cost:.4f}"

    yield from (f"{found['run']}: what was scored", "")
    rows = [["", "samples", "steps", "without image", "images stored", "scoring, s"]]
    for split, each in found["samples"].items():
        first, last = each["steps"]
        counts = [str(each[name]) for name in ("without_image", "stored_images")]
        steps = f"{first}" if first == last else f"{first} to {last}"
        rows.append([split, str(each["samples"]), steps, *counts, f"{each['seconds']:.1f}"])
    yield from aligned(rows)
    for split, each in found["samples"].items():
        if each["missing"]:
            yield f"  {split}, missing: {', '.join(f'{name} {count}' for name, count in each['missing'].items())}"
    yield from ("", "judges")
    for judge in found["judges"]:
        about = judge["about"]
        suffix = f"  {about['own']}" if about.get("own") else ""
        yield f"  {judge['fingerprint']} since step {judge['since']}: {about.get('class') or about['kind']}{suffix}"
    yield ""
    if not found["asked"]:
        yield "no judge or server outside the run was called, so there is no cost"
        return
    rows = [["judge", "calls", "failed", "attempts", "input tokens", "output tokens", "seconds per call", "cost"]]
    for each in found["asked"]:
        counts = [str(each[name]) for name in ("calls", "failed", "attempts", "input_tokens", "output_tokens")]
        rows.append([each["judge"], *counts, f"{each['seconds'] / each['calls']:.2f}", money(each["cost"])])
    yield from aligned(rows)
    yield f"  cost so far: {money(found['cost'])}"
    if found["cost"] is None:
        yield "  (no price is known; give it with --prices 0.15,0.60, per million input and output tokens)"


def _paired(samples: Sequence[LedgerSample], columns: tuple[str, str]) -> tuple[list[LedgerSample], torch.Tensor, int]:
    """The samples with scores in both columns, these scores (n, 2), float64, and the number of samples that miss one of them.
    Raises ValueError if no sample has one of the columns, or no sample has scores in both."""
    known = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    for name in columns:
        if name not in known:
            raise ValueError(f"no column {name!r} in these samples; the columns are {', '.join(known) or 'none'}")
    asked = [sample for sample in samples if all(name in sample.scores for name in columns)]
    values = torch.tensor([[sample.scores[name] for name in columns] for sample in asked], dtype=torch.float64).view(-1, 2)
    whole = ~values.isnan().any(dim=1)
    if not whole.any():
        raise ValueError(f"no sample has both {columns[0]} and {columns[1]}")
    return [sample for sample, both in zip(asked, whole.tolist(), strict=True) if both], values[whole], int((~whole).sum())


def agree(samples: Sequence[LedgerSample], columns: tuple[str, str]) -> tuple[dict[str, Any], str]:
    """The rank correlations of two columns. ``within_groups``: the share of the pairs within a group, without ties, that both
    columns order in the same way."""
    samples, values, missing = _paired(samples, columns)
    a, b = values.unbind(1)
    groups: dict[tuple[str, int, int], int] = {}
    group = torch.tensor([groups.setdefault(sample.place[:3], len(groups)) for sample in samples])
    share, pairs = measures.pairwise_agreement(a, b, group)
    spearman, kendall, means = measures.spearman(a, b), measures.kendall(a, b), [a.mean().item(), b.mean().item()]
    found = {"columns": list(columns), "samples": len(samples), "missing": missing, "spearman": spearman, "kendall": kendall}
    found |= {"within_groups": {"same_order": share, "pairs": pairs}, "means": means}
    rows = [
        ["Spearman's rho", f"{spearman:+.3f}"],
        ["Kendall's tau-b", f"{kendall:+.3f}"],
        ["pairs of a group in the same order", f"{share:.3f}", f"of {pairs}"],
        ["means", f"{means[0]:.3f}", f"{means[1]:.3f}"],
    ]
    title = f"{columns[0]} and {columns[1]}, {len(samples)} samples" + (f" ({missing} missing)" if missing else "")
    return found, "\n".join([title, *aligned(rows)])


def worst(samples: Sequence[LedgerSample], columns: tuple[str, str], run: Path, *, top: int) -> tuple[list[dict[str, Any]], str]:
    """The ``top`` samples with the largest difference of ranks in the two columns. Ranks are used because scales may differ.
    ``rank_difference``: the difference of the ranks, from 0 to 1 (first in one column, last in the other)."""
    samples, values, _ = _paired(samples, columns)
    ranks = [measures.ranks(column) for column in values.unbind(1)]
    difference = (ranks[0] - ranks[1]).abs() / max(len(samples) - 1, 1)
    images, found = RunImages(run), []
    table = [["", "step", "group", "slot", "rank difference", *columns, "task", "image"]]
    for row in difference.argsort(descending=True, stable=True)[:top].tolist():
        sample, path = samples[row], images.path(samples[row])
        place = dict(zip(("split", "step", "group", "slot"), sample.place, strict=True))
        scores = dict(zip(columns, values[row].tolist(), strict=True))
        shown_file = {"sha256": sample.image, "file": None if path is None else str(path)}
        found.append({**place, "task": sample.task, "rank_difference": difference[row].item(), **scores, **shown_file})
        shown = [f"{difference[row].item():.2f}", *(f"{scores[name]:.3f}" for name in columns)]
        table.append([*map(str, sample.place), *shown, sample.task, str(path or f"(not stored: {sample.image[:12]})")])
    return found, "\n".join(aligned(table))


def expel(
    run: Path, *, image: str | None, judge: str | None, split: str | None, steps: tuple[int, int] | None, dry_run: bool
) -> tuple[dict[str, Any], str]:
    """Expel scores from the ledgers of all ranks and of rescorings: those that match all values that are not None, or without any
    such value those that are infinite. Raises ValueError if the run has no ledger or ``image`` is not a hash.

    ``image``: the first 8 or more hexadecimal digits of the image's hash. ``judge``: the judge of an answer, or the fingerprint of
    the reward of a sample. ``split`` and ``steps`` (both ends included, counted as in the run's metrics) select samples, and the
    answers about their images. ``dry_run``: change nothing.
    """
    if image is not None and not re.fullmatch(r"[0-9a-f]{8,64}", image):
        raise ValueError(f"--image {image}: give the first 8 to 64 hexadecimal digits of the image's hash")
    by_value = (image, judge, split, steps) == (None, None, None, None)
    low, high = steps or (0, 2**63)

    def selected(row: Mapping[str, Any]) -> bool:
        if by_value:
            return not all_finite(decode_scores(row["scores"]))
        return row["picture"].startswith(image or "") and judge in (None, row["judge"])

    def rows(cursor: Any) -> list[dict[str, Any]]:
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    ledger = LedgerView.open(run)
    samples: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for file in [*ledger.files, *ledger.rescored.values()]:
        with closing(Database(file)) as database, database.writing() as connection:
            found = rows(connection.execute("SELECT split, step, group_id, slot, task, picture, judge, scores FROM samples"))
            here = [
                row for row in found if split in (None, row["split"]) and low <= row["step"] + (row["split"] == "train") <= high
            ]
            scored = [row for row in here if selected(row)]
            given = "SELECT number, picture, judge, scores, text FROM answers WHERE scores IS NOT NULL AND NOT fresh"
            images = {row["picture"] for row in here}  # of any judge: a reward that asks a judge has a fingerprint of its own
            placed = split is not None or steps is not None
            asked = [row for row in rows(connection.execute(given)) if selected(row) and (not placed or row["picture"] in images)]
            if not dry_run:
                places = [(row["split"], row["step"], row["group_id"], row["slot"]) for row in scored]
                connection.executemany("DELETE FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ?", places)
                connection.executemany(
                    "UPDATE answers SET fresh = 1, fault = 'expelled' WHERE number = ?", [(row["number"],) for row in asked]
                )
        samples += scored
        answers += asked
    result = {"run": run.name, "dry_run": dry_run, "samples": samples, "answers": answers}
    if not samples and not answers:
        return result, "no score in the ledger matches; nothing was changed"
    verb = "would be" if dry_run else "were"
    counts = f"the scores of {len(samples)} samples and {len(answers)} answers {verb} taken out of use; they are asked for again"
    table = [["", "step", "group", "slot", "judge", "scores", "image"]]
    for each in samples[:_MOST_LISTED]:
        place = each["split"], each["step"] + (each["split"] == "train"), each["group_id"], each["slot"]
        table.append([*map(str, place), each["judge"][:40], each["scores"][:60], each["picture"][:12]])
    for each in answers[:_MOST_LISTED]:
        table.append(["answer", "", "", "", each["judge"][:40], each["scores"][:60], each["picture"][:12]])
    more = max(len(samples), len(answers)) > _MOST_LISTED
    return result, "\n".join([counts, *aligned(table), *(["  ... (--json lists all)"] if more else [])])


def with_ratings(samples: Sequence[LedgerSample], file: Path, run: Path) -> list[LedgerSample]:
    """The rated samples, with the additional column ``rating``. Raises ValueError if a line is invalid or its sample does not
    exist."""
    if not file.is_file():
        raise ValueError(f"--ratings: there is no file {file}; give a CSV with a column `rating` and a column for the image")
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--ratings: {file} is not UTF-8 text ({error}); save it as CSV in UTF-8") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        lines = [(reader.line_num, line) for line in reader]
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num + 1}: {error}") from None
    header = reader.fieldnames or []
    kinds = (("image",), ("sha256",), ("step", "group", "slot"))
    key = next((names for names in kinds if {RATING, *names} <= set(header)), None)
    if key is None:
        raise ValueError(
            f"{file} has the columns {', '.join(header)}; it needs `rating`, and `image`, `sha256`, or step, group and slot"
        )
    by_image: dict[str, list[LedgerSample]] = {}
    for sample in samples:
        by_image.setdefault(sample.image, []).append(sample)
    by_place = {sample.place: sample for sample in samples}
    given: dict[int, list[float]] = {}
    for number, line in lines:
        try:
            for name in (*key, RATING):
                if not (line[name] or "").strip():  # also None, if the line is too short
                    raise ValueError(f"`{name}` is empty")
            if len(key) == 3:
                step, group, slot = (int(line[name]) for name in key)
                place = line.get("split") or "train", step, group, slot
                if place not in by_place:
                    raise ValueError(f"the run scored no sample of step {step}, group {group}, slot {slot}")
                about = [by_place[place]]
            else:
                about = _with_image(line[key[0]], by_image, roots=(file.parent, run) if key == ("image",) else ())
            rating = float(line[RATING])
            if not math.isfinite(rating):
                raise ValueError(f"the rating {line[RATING]} is not a finite number")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        for sample in about:
            given.setdefault(id(sample), []).append(rating)
    return [
        replace(sample, scores={**sample.scores, RATING: math.fsum(given[id(sample)]) / len(given[id(sample)])})
        for sample in samples
        if id(sample) in given
    ]


def _with_image(name: str, by_image: Mapping[str, list[LedgerSample]], *, roots: Sequence[Path]) -> list[LedgerSample]:
    """The samples with an image, several if the policy made the same image of a task more than once. ``name``: a file in one of the
    folders ``roots``, or a hash if there are none."""
    digest = name
    if roots:
        path = next((root / name for root in roots if (root / name).is_file()), None)
        if path is None:
            raise ValueError(f"there is no file {name} next to the CSV or in the run's folder")
        try:
            with Image.open(path) as opened:
                digest = image_hash(opened)
        except UNREADABLE as error:
            raise ValueError(f"{name} cannot be read as an image: {error}") from None
    if digest not in by_image:
        raise ValueError(f"the run scored no image {name}")
    tasks = {sample.task for sample in by_image[digest]}
    if len(tasks) > 1:
        raise ValueError(f"the image {name} was made for {len(tasks)} tasks; name its sample by step, group and slot")
    return by_image[digest]
