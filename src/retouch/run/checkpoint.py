"""Crash-safe checkpoints: ``checkpoints/step-NNNNNN/``, with safetensors for tensors and JSON for everything else.

A checkpoint is written to a temporary folder, flushed to disk and renamed, so a folder with its final name is complete.
``manifest.json`` holds the size and SHA-256 of every file, so that damage is detected and another checkpoint is used. One process
writes; all processes may read. Tensors that are sharded over ranks are gathered and written one at a time, so saving needs CPU
memory for one tensor. Loading maps the files into memory.
"""

import hashlib
import json
import logging
import os
import random
import re
import shutil
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from retouch.distributed.optimizer import GatheredTensors, fill_shards, forms, in_file_order
from retouch.distributed.ranks import Ranks
from retouch.policies.weights import WeightCopies
from retouch.records import files
from retouch.records.folder import remove
from retouch.types import Json

_TYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as a safetensors file. Views, and tensors that share storage, are written as separate full tensors.

    Each tensor is read once and released before the next is read, so CPU memory is needed for one tensor at a time.
    """
    header, end = {}, 0
    found, names = forms(tensors), in_file_order(tensors)
    for name in names:
        dtype, shape = found[name]
        begin, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % _ALIGNMENT)
    with files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        file.write(struct.pack("<Q", len(described)))
        file.write(described)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)


FORMAT = 1
_TENSORS = ".safetensors"
_NAME = re.compile(r"step-(\d{6,})")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TrainState:
    """Everything that a run needs to continue after ``step`` with the same bits.

    ``tensors``: maps a group (weights, optimizer, copies, random) to its tensors by name; each group is one file
    ``<group>.safetensors``. ``numbers``: everything else, as strict JSON (no NaN, no infinity).
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    numbers: Mapping[str, Json]


def save(folder: Path, state: TrainState, *, before_commit: Callable[[], None] = lambda: None) -> Path:
    """Write ``step-NNNNNN`` into ``folder`` and return its path once it is safely on disk.

    An intact checkpoint of that step is left as it is; a damaged one is replaced. Raises ValueError if the checkpoint cannot be
    written (for example, no space left on the disk); existing checkpoints are then unchanged. ``before_commit`` is called at the
    start and before the checkpoint gets its final name, and may raise. If tensors are sharded over ranks, rank 0 calls ``save`` and
    all other ranks call ``send``.
    """
    try:
        before_commit()
        path = folder / f"step-{state.step:06d}"
        if path.exists() and _is_intact(path):
            return path
        for group in state.tensors:
            assert _GROUP.fullmatch(group), f"no file can be named after the group {group!r}"
        content = _as_json({"step": state.step, "numbers": dict(state.numbers)})
        temporary = folder / f"{files.TEMPORARY}{path.name}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove(temporary)
            temporary.mkdir()
            for group, tensors in state.tensors.items():
                write_tensors(temporary / f"{group}{_TENSORS}", tensors)
            files.write_atomic(temporary / "state.json", content, durable=False)
            listed: dict[str, Json] = {
                file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(temporary.iterdir())
            }
            files.write_atomic(temporary / "manifest.json", _as_json({"format": FORMAT, "files": listed}), durable=False)
            for file in temporary.iterdir():
                files.fsync_folder(file)
            files.fsync_folder(temporary)
            before_commit()
            if path.exists():
                _discard(path)
            temporary.rename(path)
            files.fsync_folder(folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ValueError(
                f"could not write the checkpoint {path}: {error}. Earlier checkpoints are intact; free some space "
                "(or lower checkpoints.keep) and start the run again"
            ) from error
        return path
    finally:  # after an error too, because the other ranks are blocked in send
        send(state)


def send(state: TrainState) -> None:
    """Take part in rank 0's ``save``: send this rank's shards of the tensors that are sharded over ranks."""
    for tensors in state.tensors.values():
        if isinstance(tensors, GatheredTensors):
            tensors.send_unread()


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint that is intact according to its manifest, or None. Damaged ones are skipped with a warning."""
    return next((path for path in _newest_first(folder) if _is_intact(path)), None)


def load(path: Path) -> TrainState:
    """Read a checkpoint, with tensors on the CPU. Raises ValueError if it is damaged or of another format version."""
    groups = [name.removesuffix(_TENSORS) for name in verify(path) if name.endswith(_TENSORS)]
    record = files.read_record(path / "state.json")
    if not isinstance(record, dict) or record.get("step") != _step(path) or not isinstance(record.get("numbers"), dict):
        raise ValueError(f"{path / 'state.json'} does not describe step {_step(path)}; use another checkpoint")
    try:
        tensors = {group: load_file(path / f"{group}{_TENSORS}", device="cpu") for group in groups}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the checkpoint {path} is damaged: {error}; use another checkpoint") from error
    return TrainState(record["step"], tensors, record["numbers"])


def load_latest(folder: Path, *, groups: Collection[str]) -> TrainState | None:
    """Return the newest checkpoint that can be read and has these groups of tensors, or None. Others are skipped with a warning."""
    for path in _newest_first(folder):
        try:
            state = load(path)
            if missing := sorted(set(groups) - set(state.tensors)):
                raise ValueError(f"the checkpoint {path} has no {', '.join(missing)}")
        except ValueError as error:
            _log.warning("skipping a checkpoint: %s", error)
        else:
            return state
    return None


def verify(path: Path) -> list[str]:
    """Return the names of a checkpoint's files. Raises ValueError, with the file and the reason, if a file is not as saved."""
    try:
        files.require_plain(files.inside(path.parent, path.name))
        manifest = json.loads(files.read_bytes(path / "manifest.json"))
        listed = _listed(path, manifest)
        for name, entry in listed.items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                raise ValueError(
                    f"{path / name} has {size} bytes but had {entry['bytes']} when it was saved; use another checkpoint"
                )
            if _sha256(path / name) != entry["sha256"]:
                raise ValueError(f"{path / name} has changed since it was saved (its SHA-256 differs); use another checkpoint")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {path} is damaged: {error}; use another checkpoint") from error
    return list(listed)


def prune(folder: Path, keep: int, *, keep_every: int | None = None) -> None:
    """Remove all checkpoints except the newest ``keep``, those at multiples of ``keep_every`` steps, and the newest intact one.

    Raises ValueError if ``keep`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints; keep at least 1")
    surplus = [path for path in _newest_first(folder)[keep:] if keep_every is None or _step(path) % keep_every]
    intact = latest(folder) if surplus else None
    for path in surplus:
        if path != intact:
            _discard(path)


def rng_state() -> dict[str, Tensor]:
    """Return the states of the global generators: Python, NumPy, PyTorch on the CPU, and PyTorch on this rank's CUDA device."""
    version, words, gauss = random.getstate()
    assert version == 3, f"unknown state of Python's generator: {version}"
    legacy = numpy.random.get_state(legacy=False)
    assert isinstance(legacy, dict), "NumPy gave its generator's state in an unknown form"
    assert legacy["bit_generator"] == "MT19937", f"NumPy's global generator is {legacy['bit_generator']}"
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*legacy["state"]["key"].tolist(), legacy["state"]["pos"], legacy["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor(legacy["gauss"], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set the generators to the result of ``rng_state``; the CUDA generator only if the state has it and CUDA is available."""
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    *key, position, has_gauss = state["numpy"].tolist()
    inner = {"key": numpy.array(key, dtype=numpy.uint32), "pos": position}
    numpy.random.set_state(
        {"bit_generator": "MT19937", "state": inner, "has_gauss": has_gauss, "gauss": state["numpy_gauss"].item()}
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _newest_first(folder: Path) -> list[Path]:
    """Return all paths that are named like a checkpoint, intact or not, from the last step to the first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _is_intact(path: Path) -> bool:
    try:
        verify(path)
    except ValueError as error:
        _log.warning("skipping a checkpoint: %s", error)
        return False
    return True


def _listed(path: Path, manifest: object) -> dict[str, dict[str, object]]:
    """Return the files in the manifest. Raises ValueError if it has another format, or names files outside of the folder."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path / 'manifest.json'} is not a checkpoint's manifest; use another checkpoint")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}; this version of Retouch reads {FORMAT}: use the version that wrote it"
        )
    listed: dict[str, dict[str, object]] = manifest["files"]
    valid = all(
        Path(name).name == name and isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
        for name, entry in listed.items()
    )
    unlisted = {file.name for file in path.glob(f"*{_TENSORS}")} - listed.keys()
    if not valid or unlisted or "state.json" not in listed:
        raise ValueError(f"{path / 'manifest.json'} does not describe a checkpoint; use another one")
    return listed


def _as_json(value: Json) -> bytes:
    """Return strict JSON. Raises ValueError for a number that JSON cannot represent, because dropping it would change the state."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _sha256(path: Path) -> str:
    with files.open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # typeshed: IO lacks readinto


def _discard(path: Path) -> None:
    """Rename a checkpoint and then delete its files, so that an interrupted removal leaves no incomplete checkpoint."""
    temporary = path.with_name(f"{files.TEMPORARY}old-{path.name}")
    remove(temporary)
    path.rename(temporary)
    files.fsync_folder(path.parent)
    remove(temporary)


GROUPS = ("weights", "optimizer", "copies", "random")


TEXT_TO_IMAGE = "text_to_image/"


def with_image_model(tensors: Mapping[str, Tensor], painted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a writer, and those of the image model that trains with it, as a checkpoint names them."""
    return {**tensors, **{f"{TEXT_TO_IMAGE}{name}": tensor for name, tensor in painted.items()}}


def restore_weights(copies: WeightCopies, state: TrainState, painted: WeightCopies | None = None) -> None:
    """Restore the trained weights and their copies, and those of the image model, ``painted``; without it, the image model's
    weights in the checkpoint are not read. Raises ValueError if the checkpoint contains other weights."""
    weights, stored = state.tensors["weights"], state.tensors["copies"]
    for own, start in ((copies, ""), (painted, TEXT_TO_IMAGE)):
        if own is None:
            continue
        mine, theirs = (
            {name.removeprefix(start): tensor for name, tensor in found.items() if name.startswith(TEXT_TO_IMAGE) == bool(start)}
            for found in (weights, stored)
        )
        if own.parameters.keys() != mine.keys():
            raise ValueError(f"the checkpoint of step {state.step} has other weights than the recipe trains")
        for name, parameter in own.parameters.items():
            fill_shards(parameter, mine[name])
        own.load(theirs)


def restore_copy(copies: WeightCopies, copy: str, checkpoints: Path) -> None:
    """Set one copy to the newest weights in the folder of checkpoints of another run: their average, if that run kept one.

    Raises ValueError if there is no readable checkpoint, or if it has other weights than this run trains.
    """
    state = load_latest(checkpoints, groups=("weights", "copies"))
    if state is None:
        raise ValueError(f"{checkpoints}: there is no readable checkpoint")
    averaged = {name.removeprefix("average/"): t for name, t in state.tensors["copies"].items() if name.startswith("average/")}
    found = averaged or {name: tensor for name, tensor in state.tensors["weights"].items() if not name.startswith(TEXT_TO_IMAGE)}
    shapes = {name: tensor.shape for name, tensor in found.items()}
    if shapes != {name: parameter.shape for name, parameter in copies.parameters.items()}:
        raise ValueError(
            f"{checkpoints}: its weights are not those that this run trains; use a run with the same model and policy.train"
        )
    copies.load({**copies.state(), **{f"{copy}/{name}": tensor for name, tensor in found.items()}})


def all_generators(ranks: Ranks) -> dict[str, Tensor]:
    """Return the states of the global generators of all ranks; for ranks after the first, under ``<rank>/<name>``."""
    found = {}
    for name, mine in rng_state().items():
        for rank, theirs in enumerate(ranks.gather(mine[None])):
            found[f"{rank}/{name}" if rank else name] = theirs.clone()
    return found


def set_generators(ranks: Ranks, state: Mapping[str, Tensor]) -> None:
    """Restore this rank's generators. A rank that is not in the checkpoint keeps its current states."""
    mine = f"{ranks.rank}/" if ranks.rank else ""
    own = {
        name.removeprefix(mine): tensor for name, tensor in state.items() if name.startswith(mine) and ("/" in name) == bool(mine)
    }
    if own:
        restore_rng(own)
