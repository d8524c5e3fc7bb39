"""Converts published editing data sets to a folder with ``metadata.jsonl``: GPT-Image-Edit-1.5M, AURORA, OmniEdit and MagicBrush.

The first two are folders of images with JSON lists; their images stay where they are. The other two are parquet files; their images
are written to files without encoding them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.data.guard import refuse_test_sets
from retouch.data.sources.folder import METADATA, path_under
from retouch.records.files import json_line, read_json, replacing
from retouch.types import Json

_ROWS = 16
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEdit:
    """One edit of a published data set. ``image``, ``target``: the path or the content of the image file; None if it is missing.
    ``extra``: further keys of the line in ``metadata.jsonl``."""

    id: str
    instruction: str | list[str]
    image: Path | bytes | None
    target: Path | bytes | None
    source: str
    extra: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion. ``folder``: a data set of kind ``folder``. ``rows``: the number of its edits. ``missing``: the
    number of edits that were left out because an image is missing. ``tags``: the keys to give as ``data.tags``."""

    folder: Path
    rows: int
    missing: int
    tags: tuple[str, ...]

    def __str__(self) -> str:
        left_out = f"; {self.missing} left out, because an image is missing" if self.missing else ""
        tags = f", tags: {json.dumps(list(self.tags))}" if self.tags else ""
        return f"{self.rows} edits{left_out}. Use them with data: {{ kind: 'folder', path: '{self.folder}'{tags} }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How a published data set is read. ``edits``: yields the edits of a folder and a split. ``tags``: the keys that become tags.
    ``in_place``: whether the images are files of the folder, which stay where they are."""

    edits: Callable[[Path, str], Iterator[PublishedEdit]]
    tags: tuple[str, ...]
    in_place: bool


def convert(name: str, source: str | Path, *, out: str | Path | None = None, split: str = "train") -> Converted:
    """Write ``metadata.jsonl`` for a downloaded data set, and also its images if they are in parquet files.

    ``name``: one of ``PUBLISHED``. ``source``: the folder that was downloaded. ``out``: the folder of the new data set, which must
    not have a ``metadata.jsonl`` yet; for data sets whose images are files it is ``source`` itself. Raises ValueError for an
    unknown name, for a known test set, and for a folder without such data.
    """
    if name not in PUBLISHED:
        raise ValueError(f"{name}: no such data set; the known data sets are {', '.join(PUBLISHED)}")
    known, folder = PUBLISHED[name], Path(source)
    if not folder.is_dir():
        raise ValueError(f"{source}: no such folder; download the data set first, for example with `hf download`")
    refuse_test_sets([f"{name}/{split}", source], split=split, allow_test_sets=False)
    if known.in_place and out is not None and Path(out).resolve() != folder.resolve():
        raise ValueError(f"{name}: its images stay where they are, so leave out --out; {METADATA[0]} is written into {source}")
    if not known.in_place and out is None:
        raise ValueError(f"{name}: its images are in parquet files; name a folder for them with --out")
    root = folder if out is None or known.in_place else Path(out)
    file = root / METADATA[0]
    if file.exists():
        raise ValueError(f"{file} exists; remove it, or give another folder")
    root.mkdir(parents=True, exist_ok=True)
    rows = missing = 0
    with replacing(file) as lines:
        for edit in known.edits(folder, split):
            try:
                names = [_image_name(root, edit, part) for part in ("image", "target")]
            except FileNotFoundError:
                missing += 1
                continue
            line = {"id": edit.id, "instruction": edit.instruction, "file_name": names[0], "target": names[1]}
            lines.write(json_line({**line, "source": edit.source, **edit.extra}))
            rows += 1
        if not rows:
            raise ValueError(
                f"{source}: no edit of {name} has both images ({missing} lack one); give the folder that was downloaded"
            )
    return Converted(root, rows, missing, known.tags)


def _image_name(root: Path, edit: PublishedEdit, part: str) -> str:
    """The path of an image relative to ``root``. An image that is not a file yet is written to one first.

    Raises FileNotFoundError if the image is missing, and ValueError for an unknown format.
    """
    content: Path | bytes | None = getattr(edit, part)
    if content is None or (isinstance(content, Path) and not content.is_file()):
        raise FileNotFoundError(f"{edit.id}: no {part}")
    if isinstance(content, Path):
        return content.relative_to(root).as_posix()
    suffix = next((suffix for start, suffix in _SUFFIXES.items() if content.startswith(start)), None)
    if suffix is None:
        raise ValueError(f"{edit.id}: the {part} is neither PNG, JPEG nor WebP")
    safe = "".join(sign if sign.isalnum() or sign in "-_" else "-" for sign in edit.id)
    file = root / f"{part}s" / f"{safe}{suffix}"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return file.relative_to(root).as_posix()


def _gpt_image_edit(folder: Path, split: str) -> Iterator[PublishedEdit]:
    """The edits in ``TASK/metadata/*.json`` at any depth, with paths relative to the folder of the task."""
    for file in sorted(folder.rglob("metadata/*.json")):
        task = file.parent.parent
        for fields in _list(file, ("id", "input", "output", "instruction", *PUBLISHED["gpt-image-edit"].tags)):
            image = _under(task, fields["input"])
            yield PublishedEdit(
                id=str(fields["id"]),
                instruction=fields["instruction"],
                image=image,
                target=_under(task, fields["output"]),
                source=image.relative_to(folder).as_posix(),
                extra={key: fields[key] for key in PUBLISHED["gpt-image-edit"].tags},
            )


def _aurora(folder: Path, split: str) -> Iterator[PublishedEdit]:
    """The edits in ``data/NAME/SPLIT.json``, with paths relative to the folder that contains ``data``."""
    for file in sorted(folder.rglob(f"data/*/{split}.json")):
        top, name = file.parent.parent.parent, file.parent.name
        for number, fields in enumerate(_list(file, ("input", "output", "instruction"))):
            image = _under(top, fields["input"])
            yield PublishedEdit(
                id=f"{name}-{number}",
                instruction=fields["instruction"],
                image=image,
                target=_under(top, fields["output"]),
                source=image.relative_to(folder).as_posix(),
                extra={"data_set": name},
            )


def _omniedit(folder: Path, split: str) -> Iterator[PublishedEdit]:
    for row in _parquet(folder, split, ("omni_edit_id", "task", "edited_prompt_list", "src_img", "edited_img")):
        yield PublishedEdit(
            id=str(row["omni_edit_id"]),
            instruction=list(row["edited_prompt_list"]),
            image=_content(row["src_img"]),
            target=_content(row["edited_img"]),
            source=str(row["omni_edit_id"]),
            extra={"task": row["task"]},
        )


def _magicbrush(folder: Path, split: str) -> Iterator[PublishedEdit]:
    """The edits of MagicBrush. All turns of an image have the same source, so that a split never separates them."""
    for row in _parquet(folder, split, ("img_id", "turn_index", "instruction", "source_img", "target_img")):
        yield PublishedEdit(
            id=f"{row['img_id']}-{row['turn_index']}",
            instruction=row["instruction"],
            image=_content(row["source_img"]),
            target=_content(row["target_img"]),
            source=str(row["img_id"]),
            extra={"turn": str(row["turn_index"])},
        )


PUBLISHED: Mapping[str, Published] = {
    "gpt-image-edit": Published(edits=_gpt_image_edit, tags=("dataset_source", "task", "instruction_type"), in_place=True),
    "aurora": Published(edits=_aurora, tags=("data_set",), in_place=True),
    "omniedit": Published(edits=_omniedit, tags=("task",), in_place=False),
    "magicbrush": Published(edits=_magicbrush, tags=("turn",), in_place=False),
}


def _list(file: Path, keys: tuple[str, ...]) -> list[Fields]:
    """The rows of a JSON list. Raises ValueError if the file is not a JSON list, and for a row that lacks one of ``keys``."""
    rows = read_json(file)
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row.keys() >= {*keys} for row in rows):
        raise ValueError(f"{file}: should be a list of edits with {', '.join(keys)}")
    return rows


def _under(folder: Path, name: str) -> Path:
    """The path ``folder / name``, also if it does not exist. Raises ValueError if an existing file is outside ``folder``."""
    path = folder / name
    if path.exists():
        path_under(folder, name)
    return path


def _parquet(folder: Path, split: str, columns: tuple[str, ...]) -> Iterator[Fields]:
    """The rows of the parquet files of a split. Raises ValueError if there are no such files, or if a column is missing."""
    import pyarrow.parquet

    files = sorted(file for file in folder.rglob("*.parquet") if file.name.startswith(f"{split}-"))
    if not files:
        raise ValueError(f"{folder}: no {split}-*.parquet")
    for file in files:
        table = pyarrow.parquet.ParquetFile(file)
        if lacking := [column for column in columns if column not in table.schema_arrow.names]:
            raise ValueError(f"{file}: no column {lacking[0]!r}; it has {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(batch_size=_ROWS, columns=list(columns)):
            yield from batch.to_pylist()


def _content(cell: Any) -> bytes | None:
    """The bytes of an image cell, or None if it has none."""
    content = cell.get("bytes") if isinstance(cell, Mapping) else cell
    return content if isinstance(content, bytes) and content else None
