"""Encodes the images of a data set as image tokens, once for all runs that train on the codes.

The rows are distributed over shards: row k belongs to shard k modulo the number of shards. Each shard writes the features of its
rows and a list of them. A shard that finds the lists of all shards merges them, and renames the merged file into place, so that
several shards may end at the same time.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import torch
from jaxtyping import Int
from PIL.Image import Image
from pydantic import ValidationError
from torch import Tensor

from retouch.config import consent, imports, wings
from retouch.config.errors import mistakes
from retouch.config.packaged import SUFFIXES, find
from retouch.config.section import Section
from retouch.data.base import DataSource, usable_tasks
from retouch.data.checks import OnBadRow
from retouch.data.kinds import DATA, read_path
from retouch.distributed.ranks import find_device
from retouch.models.pretrained import MODEL, fetch_weights
from retouch.recipe.document import evaluate
from retouch.records.files import read_json, write_atomic, write_json, write_png
from retouch.types import Codes, Task
from retouch_models.emu3 import Emu3ImageTokenizer, load_autoencoder
from retouch_models.features import Feature
from retouch_models.image_tokens import FEATURES, LIST

LONGEST_NAME = 200
Encode = Callable[[Sequence[Image]], Int[Tensor, "r h w"]]


class _Holder(Section):
    data: Annotated[DataSource, DATA]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A tokenization job, in values that can be passed to another process.

    ``source``: a folder or data set, a ``data`` section (JSON or a file with it), or a recipe. ``model``: folder or Hub id of the
    autoencoder, or "playground" for the built-in autoencoder. ``out``: the folder of the new data set. ``size``: (height, width) in
    px. ``batch``: tasks per forward pass. ``pictures``: also store the images. ``skip``: leave out unusable rows.
    """

    source: str
    model: str
    out: Path
    size: tuple[int, int]
    batch: int = 8
    device: str = "auto"
    pictures: bool = False
    skip: bool = False

    def stamp(self, *, of: int, rows: int) -> str:
        """A digest that is equal in the lists of all shards of one job."""
        settings = [self.source, self.model, self.size, self.pictures, of, rows]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def tokenize(job: Job, *, processes: int = 1) -> Path:
    """Tokenize all rows with ``processes`` processes on this machine; returns the list of feature files.

    Raises ValueError in the cases of ``tokenize_shard``.
    """
    if processes < 1:
        raise ValueError(f"{processes} processes: use at least 1")
    if processes == 1:
        found = tokenize_shard(job, 0, of=1)
    else:
        with imports.spawning() as context, ProcessPoolExecutor(processes, mp_context=context) as pool:
            found = [*pool.map(partial(tokenize_shard, job, of=processes), range(processes))][-1]
            found = merge(job.out, of=processes) if found is None else found
    assert found is not None, "every shard has ended"
    return found


def tokenize_shard(job: Job, shard: int, *, of: int) -> Path | None:
    """Tokenize the rows of one shard; returns the list of all feature files if all other shards are done too, else None.

    Raises ValueError if there is no such shard, if rows are unusable, and if a task does not have exactly one source image or has a
    mask or reference image, which the layout cannot store.
    """
    if not 0 <= shard < of or job.batch < 1:
        raise ValueError(f"shard {shard}/{of}, batch {job.batch}: shards count from 0 to one below their number; batches from 1")
    tasks = read_tasks(job.source, size=job.size, skip=job.skip)
    own = _list_of(job.out, shard, of)
    own.unlink(missing_ok=True)
    for folder in (own.parent, job.out / FEATURES, *([job.out / "pictures"] if job.pictures else [])):
        folder.mkdir(parents=True, exist_ok=True)
    encode = _autoencoder(job, shard).encode
    names = []
    mine = range(shard, len(tasks), of)
    for first in range(0, len(mine), job.batch):
        rows = mine[first : first + job.batch]
        for row, (name, content) in zip(rows, _features(job, [tasks[row] for row in rows], encode), strict=True):
            write_atomic(job.out / FEATURES / name, content)
            names.append([row, name])
    write_json(own, {"stamp": job.stamp(of=of, rows=len(tasks)), "rows": len(tasks), "names": names})
    return merge(job.out, of=of)


def merge(out: Path, *, of: int) -> Path | None:
    """Merge the lists of all shards, in the order of the rows; None if one is missing or belongs to another job."""
    files = [_list_of(out, shard, of) for shard in range(of)]
    if not all(file.is_file() for file in files):
        return None
    lists = [read_json(file) for file in files]
    if len({record["stamp"] for record in lists}) > 1:
        return None
    names = dict(sorted((row, name) for record in lists for row, name in record["names"]))
    assert len(names) == lists[0]["rows"], "shards share out every row"
    if len(set(names.values())) < len(names):
        raise ValueError("two tasks have the same id, and thus the same file; give the rows of the data set unique ids")
    merged = out / LIST
    write_json(merged, {"prefix": str((out / FEATURES).resolve()), "path_list": list(names.values())})
    return merged


def read_tasks(source: str, *, size: tuple[int, int], skip: bool = False) -> Sequence[Task]:
    """The tasks of a data set, with images resized as in training. ``skip``: leave out unusable rows instead of raising an error.

    Raises ValueError if data is missing or rows are unusable.
    """
    on_bad_row: OnBadRow = "skip" if skip else "refuse"
    if source.lstrip().startswith("{"):
        try:
            section = _section(json.loads(source), allow_imports=consent.named_in_words([f"={source}"], json.loads))
        except json.JSONDecodeError as error:
            raise ValueError(f"{source!r} is not JSON ({error.msg}); give a data section as in a recipe") from None
    elif source.endswith(SUFFIXES):
        section = _section(evaluate(find(source)))
    else:
        return usable_tasks(read_path(source), size=size, on_bad_row=on_bad_row)
    return section.all_tasks(size=size, on_bad_row=on_bad_row)


def _section(document: Mapping[str, Any], *, allow_imports: Sequence[str] = ()) -> DataSource:
    """The ``data`` section of a recipe, or ``document`` itself as a data section."""
    held = {"data": document.get("data", document)}
    with consent.reading(held, allow=allow_imports):
        try:
            return _Holder.model_validate_json(json.dumps(held)).data
        except ValidationError as error:
            raise mistakes(error, held, _Holder) from None


def _autoencoder(job: Job, shard: int) -> Emu3ImageTokenizer:
    device = find_device(job.device)
    if job.device == "auto" and device.type == "cuda":
        device = torch.device("cuda", shard % torch.cuda.device_count())
    path = (
        wings.load("part.playground_weights")("emu3") / "autoencoder"
        if job.model == "playground"
        else fetch_weights(job.model, MODEL)
    )
    return Emu3ImageTokenizer(load_autoencoder(path).to(device), job.size)


def _features(job: Job, tasks: Sequence[Task], encode: Encode) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each task's file; the images of all ``tasks`` are encoded together."""
    for task in tasks:
        if len(task.images) != 1:
            raise ValueError(f"task {task.id!r} has {len(task.images)} images; this layout needs exactly one source image")
        if task.mask is not None or task.reference is not None:
            raise ValueError(f"task {task.id!r} has a mask or a reference image, which this layout cannot store")
    sources = encode([task.images[0] for task in tasks])
    edited = [task.target for task in tasks if task.target is not None]
    targets = iter(encode(edited) if edited else ())
    for task, source in zip(tasks, sources, strict=True):
        thought = task.meta.get(Codes.THOUGHT)
        name = quote(task.id, safe=" ()+,=@")  # unique for the id
        name = name if len(name) <= LONGEST_NAME else hashlib.sha256(task.id.encode()).hexdigest()
        kept = {"original": task.images[0], **({} if task.target is None else {"edited": task.target})} if job.pictures else {}
        for part, image in kept.items():
            write_png(job.out / "pictures" / f"{name}.{part}.png", image)
        yield (
            f"{name}.safetensors",
            Feature(
                id=task.id,
                instruction=task.instruction,
                source=source,
                target=None if task.target is None else next(targets),
                thought=thought if isinstance(thought, str) else None,
                task={
                    "text": task.text,
                    "tags": dict(task.tags),
                    "meta": {key: value for key, value in task.meta.items() if key != Codes.THOUGHT},
                    "pictures": {part: f"pictures/{name}.{part}.png" for part in kept},
                },
            ).to_bytes(),
        )


def _list_of(out: Path, shard: int, of: int) -> Path:
    return out / "list" / "shards" / f"{shard:05d}-of-{of:05d}.json"
