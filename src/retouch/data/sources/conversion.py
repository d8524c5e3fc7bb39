"""Converts published data sets to layouts that training can read.

GPT-Image-Edit-1.5M, AURORA, OmniEdit and MagicBrush become a folder with ``metadata.jsonl``. The first two are folders of images
with JSON lists; their images stay where they are. The other two are parquet files; their images are written to files without
encoding them again.

MMMG's training set (``MMMGBench/MMMG_Train``, arXiv 2506.10963) becomes a curriculum: prompt lists from easy to hard tasks. Its
``train.json`` maps a level ("0_preschool") to disciplines, and each discipline to a list of rows with ``question``, ``key``, the
knowledge graph (``Visual Components``) and its meaning (``Key Knowledge``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from retouch.data.guard import refuse_test_sets
from retouch.data.sources.folder import METADATA, path_under
from retouch.records.files import json_line, read_json, replacing, write_lines

_ROWS = 16
_SUFFIXES = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}
Fields = Mapping[str, Any]
Edit: TypeAlias = tuple[Path | bytes | None, Path | bytes | None, dict[str, Any]]
"""The source and the edited image, each as the path or the content of its file (None: missing), and the keys of the line in
``metadata.jsonl``."""


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
        for image, target, fields in known.edits(folder, split):
            found = {"file_name": image, "target": target}
            if any(each is None or (isinstance(each, Path) and not each.is_file()) for each in found.values()):
                missing += 1
                continue
            names = {}
            for key, each in found.items():
                if isinstance(each, bytes):  # from a parquet file; it is not encoded again
                    part = "image" if key == "file_name" else key
                    suffix = next((suffix for start, suffix in _SUFFIXES.items() if each.startswith(start)), None)
                    if suffix is None:
                        raise ValueError(f"{fields['id']}: the {part} is neither PNG, JPEG nor WebP")
                    safe = "".join(sign if sign.isalnum() or sign in "-_" else "-" for sign in fields["id"])
                    path = root / f"{part}s" / f"{safe}{suffix}"
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(each)
                    each = path
                assert each is not None
                names[key] = each.relative_to(root).as_posix()
            lines.write(json_line({"id": fields["id"], "instruction": fields["instruction"], **names, **fields}))
            rows += 1
        if not rows:
            raise ValueError(
                f"{source}: no edit of {name} has both images ({missing} lack one); give the folder that was downloaded"
            )
    return Converted(root, rows, missing, known.tags)


def _gpt_image_edit(folder: Path, split: str) -> Iterator[Edit]:
    """The edits in ``TASK/metadata/*.json`` at any depth, with paths relative to the folder of the task."""
    tags = PUBLISHED["gpt-image-edit"].tags
    for file in sorted(folder.rglob("metadata/*.json")):
        task = file.parent.parent
        for row in _list(file, ("id", "input", "output", "instruction", *tags)):
            image, target = _under(task, row["input"]), _under(task, row["output"])
            names = {"id": str(row["id"]), "instruction": row["instruction"], "source": image.relative_to(folder).as_posix()}
            yield image, target, {**names, **{key: row[key] for key in tags}}


def _aurora(folder: Path, split: str) -> Iterator[Edit]:
    """The edits in ``data/NAME/SPLIT.json``, with paths relative to the folder that contains ``data``."""
    for file in sorted(folder.rglob(f"data/*/{split}.json")):
        top, name = file.parent.parent.parent, file.parent.name
        for number, row in enumerate(_list(file, ("input", "output", "instruction"))):
            image, target = _under(top, row["input"]), _under(top, row["output"])
            names = {"id": f"{name}-{number}", "instruction": row["instruction"], "source": image.relative_to(folder).as_posix()}
            yield image, target, {**names, "data_set": name}


def _omniedit(folder: Path, split: str) -> Iterator[Edit]:
    for row in _parquet(folder, split, ("omni_edit_id", "task", "edited_prompt_list", "src_img", "edited_img")):
        fields = {"id": str(row["omni_edit_id"]), "source": str(row["omni_edit_id"]), "task": row["task"]}
        yield _content(row["src_img"]), _content(row["edited_img"]), {**fields, "instruction": list(row["edited_prompt_list"])}


def _magicbrush(folder: Path, split: str) -> Iterator[Edit]:
    """The edits of MagicBrush. All turns of an image have the same source, so that a split never separates them."""
    for row in _parquet(folder, split, ("img_id", "turn_index", "instruction", "source_img", "target_img")):
        image, turn = str(row["img_id"]), str(row["turn_index"])
        fields = {"id": f"{image}-{turn}", "instruction": row["instruction"], "source": image, "turn": turn}
        yield _content(row["source_img"]), _content(row["target_img"]), fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """How a published data set is read. ``edits``: yields the edits of a folder and a split. ``tags``: the keys that become tags.
    ``in_place``: whether the images are files of the folder, which stay where they are."""

    edits: Callable[[Path, str], Iterator[Edit]]
    tags: tuple[str, ...]
    in_place: bool


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


TRAIN = "train.json"
DIFFICULTY = "mmmg_difficulty_summary.json"
"""A file with pairs of level and discipline as ``tuples``, the easiest first, in the format of the TRL writer script."""
_TAGS = ("level", "discipline")

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The written prompt lists. ``files``: one for each stage, with the rows of the previous stage and harder ones. ``rows``: the
    number of rows in the last one."""

    files: tuple[Path, ...]
    rows: int

    def __str__(self) -> str:
        tags = json.dumps(list(_TAGS))
        return (
            f"{self.rows} prompts in {len(self.files)} stages. Give each phase of the recipe the data of its stage: "
            f"data: {{ kind: 'prompts', path: '{self.files[0]}', held_out: 0.05, tags: {tags} }}"
        )


def write_curriculum(source: str | Path, *, out: str | Path, stages: int = 5) -> Curriculum:
    """Write ``stage-1.jsonl`` to ``stage-N.jsonl`` into ``out``, where these files must not exist yet.

    The pairs of level and discipline are in the order of ``mmmg_difficulty_summary.json`` if ``source`` has this file; pairs that
    the file does not contain come last, in the order of the levels. As in the TRL writer script, each stage adds the same number of
    pairs; if they cannot be divided evenly, the first stages add one more. Raises ValueError for a folder without ``train.json`` in
    this form, and for more stages than pairs.
    """
    folder, target = Path(source), Path(out)
    refuse_test_sets([source], allow_test_sets=False)
    file = folder / TRAIN
    if not file.is_file():
        raise ValueError(f"{file}: no such file; download MMMGBench/MMMG_Train first, for example with `hf download`")
    pairs: dict[Pair, list[dict[str, Any]]] = {}  # without rows that lack a question or a key, as in the TRL writer script
    for level, disciplines in sorted(_map(file).items()):
        if not isinstance(disciplines, Mapping) or not all(isinstance(rows, list) for rows in disciplines.values()):
            raise ValueError(f"{file}: {level} should map disciplines to lists of rows")
        for discipline, rows in disciplines.items():
            pair = level.rpartition("_")[2], discipline
            for row in rows:
                if row.get("question") and row.get("key"):
                    graph = {key: row[key] for key in ("Visual Components", "Key Knowledge") if key in row}
                    names = {"id": str(row["key"]), "prompt": row["question"], "level": pair[0], "discipline": discipline}
                    pairs.setdefault(pair, []).append({**names, **graph})
    if not pairs:
        raise ValueError(f"{file}: no row with a question and a key")
    places: dict[Pair, int] = {}
    if (folder / DIFFICULTY).is_file():
        entries = _map(folder / DIFFICULTY).get("tuples")
        if not isinstance(entries, list) or not all(isinstance(each, Mapping) and each.keys() >= {*_TAGS} for each in entries):
            raise ValueError(f"{folder / DIFFICULTY}: should have tuples with level and discipline")
        places = {(each["level"].rpartition("_")[2], each["discipline"]): place for place, each in enumerate(entries)}
    order = sorted(pairs, key=lambda pair: places.get(pair, len(places)))
    if not 1 <= stages <= len(order):
        raise ValueError(f"--stages {stages}: give a number from 1 to {len(order)}, the pairs of level and discipline in {file}")
    share, more = divmod(len(order), stages)
    ends = list(accumulate(share + (stage < more) for stage in range(stages)))
    files = tuple(target / f"stage-{stage}.jsonl" for stage in range(1, stages + 1))
    if taken := next((path for path in files if path.exists()), None):
        raise ValueError(f"{taken} exists; remove it, or give another folder")
    target.mkdir(parents=True, exist_ok=True)
    for path, end in zip(files, ends, strict=True):
        write_lines(path, [row for pair in order[:end] for row in pairs[pair]])
    return Curriculum(files, sum(len(rows) for rows in pairs.values()))


def _map(file: Path) -> Mapping[str, Any]:
    found = read_json(file)
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: should be a JSON object")
    return found
