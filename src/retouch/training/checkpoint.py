"""Checkpoints that survive a kill: ``checkpoints/step-NNNNNN/``, safetensors for tensors and JSON for the rest.

A checkpoint is written aside, flushed to the disk and renamed, so a folder of that name is whole. ``manifest.json`` holds the size
and SHA-256 of every file, so one that was damaged later is seen and passed over. One process writes; any may read.
"""

import hashlib
import json
import logging
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.records import files
from retouch.types import Json

FORMAT = 1
_ASIDE = ".tmp-"
_TENSORS = ".safetensors"
_NAME = re.compile(r"step-(\d{6,})")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Everything from which a run goes on to the same bits after ``step``.

    ``tensors``: group (weights, optimizer, copies, rng) to name to tensor; each group is one ``<group>.safetensors``. ``numbers``:
    what is no tensor, as strict JSON (so no NaN and no infinity).
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    numbers: Mapping[str, Json]


def save(folder: Path, state: State) -> Path:
    """Write ``step-NNNNNN`` into ``folder`` and return it, once it is safe on the disk.

    A good one of that step stays as it is; a damaged one is replaced. ValueError where it could not be written (no space left,
    say); what was there before is then untouched.
    """
    place = folder / f"step-{state.step:06d}"
    if place.exists() and _is_good(place):
        return place
    for group in state.tensors:
        assert _GROUP.fullmatch(group), f"no file can be named after the group {group!r}"
    content = _as_json({"step": state.step, "numbers": dict(state.numbers)})
    aside = folder / f"{_ASIDE}{place.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(aside)
        aside.mkdir()
        for group, tensors in state.tensors.items():
            save_file(_separate(tensors), aside / f"{group}{_TENSORS}")
        (aside / "state.json").write_bytes(content)
        (aside / "manifest.json").write_bytes(_as_json(_manifest(aside)))
        for path in aside.iterdir():
            files.fsync_folder(path)
        files.fsync_folder(aside)
        if place.exists():
            _discard(place)
        aside.rename(place)
        files.fsync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise ValueError(
            f"could not write the checkpoint {place}: {error}. Earlier checkpoints are untouched; free some space "
            "(or set checkpoints.keep lower) and start the run again"
        ) from error
    return place


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole by its manifest; None if there is none. Damaged ones are passed over with a warning."""
    for path in _newest_first(folder):
        if _is_good(path):
            return path
    return None


def load(path: Path) -> State:
    """Read a checkpoint, tensors on the CPU. ValueError where it is damaged or another version's."""
    groups = [name.removesuffix(_TENSORS) for name in verify(path) if name.endswith(_TENSORS)]
    kept = files.read_json(path / "state.json")
    tensors = {group: load_file(path / f"{group}{_TENSORS}", device="cpu") for group in groups}
    return State(kept["step"], tensors, kept["numbers"])


def verify(path: Path) -> list[str]:
    """The names of a checkpoint's files. ValueError, with the file and what is wrong, where one is not what ``save`` wrote."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        listed = _listed(path, manifest)
        for name, kept in listed.items():
            size = (path / name).stat().st_size
            if size != kept["bytes"]:
                raise ValueError(
                    f"{path / name} has {size} bytes and had {kept['bytes']} when it was saved; use another checkpoint"
                )
            if _sha256(path / name) != kept["sha256"]:
                raise ValueError(f"{path / name} was changed since it was saved (its SHA-256 differs); use another checkpoint")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the checkpoint {path} is damaged: {error}; use another checkpoint") from error
    return list(listed)


def prune(folder: Path, keep: int, *, keep_every: int | None = None) -> None:
    """Remove all but the newest ``keep`` checkpoints and those of every ``keep_every`` steps, and never the newest good one.

    ValueError for ``keep`` below 1.
    """
    if keep < 1:
        raise ValueError(f"cannot keep {keep} checkpoints; keep at least 1")
    surplus = [path for path in _newest_first(folder)[keep:] if keep_every is None or _step(path) % keep_every]
    good = latest(folder) if surplus else None
    for path in surplus:
        if path != good:
            _discard(path)


def tidy(folder: Path) -> None:
    """Remove what a killed save or prune left behind. Only the process that writes may call it."""
    for path in folder.glob(f"{_ASIDE}*"):
        _remove(path)


def rng_state() -> dict[str, Tensor]:
    """The state of this process's global generators: Python's, NumPy's, PyTorch's on the CPU and on this rank's CUDA device."""
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
    return state | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else state  # type: ignore[no-untyped-call]


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Set the generators as ``rng_state`` found them; CUDA's where the state has it and this process has a device."""
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
    """What is named like a checkpoint, good or not."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except ValueError as error:
        _log.warning("passing over a checkpoint: %s", error)
        return False
    return True


def _listed(path: Path, manifest: object) -> dict[str, dict[str, object]]:
    """The manifest's files. ValueError where it is not a manifest of this format and of files beside it."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{path / 'manifest.json'} is not a checkpoint's manifest; use another checkpoint")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}; this version of Retouch reads {FORMAT}: use the version that wrote it"
        )
    listed: dict[str, dict[str, object]] = manifest["files"]
    sound = all(
        Path(name).name == name and isinstance(kept, dict) and kept.keys() == {"bytes", "sha256"} for name, kept in listed.items()
    )
    if not sound or "state.json" not in listed:
        raise ValueError(f"{path / 'manifest.json'} does not describe a checkpoint; use another one")
    return listed


def _manifest(folder: Path) -> dict[str, Json]:
    kept: dict[str, Json] = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())
    }
    return {"format": FORMAT, "files": kept}


def _as_json(value: Json) -> bytes:
    """Strict JSON; ValueError for a number that JSON cannot hold, since dropping it would change the state."""
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two in one storage: what safetensors takes."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        on_cpu = tensor.detach().cpu().contiguous()
        storage = on_cpu.untyped_storage().data_ptr()
        separate[name] = on_cpu.clone() if storage in seen else on_cpu
        seen.add(storage)
    return separate


def _discard(path: Path) -> None:
    """Remove a checkpoint: out of sight in one rename, then file by file."""
    aside = path.with_name(f"{_ASIDE}old-{path.name}")
    _remove(aside)
    path.rename(aside)
    files.fsync_folder(path.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
