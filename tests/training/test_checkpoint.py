"""Checkpoints: they are restored bitwise, damage is detected, and a kill or a full disk loses nothing."""

import os
import random
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retouch.records.folder import remove_leftovers
from retouch.run import checkpoint
from retouch.run.checkpoint import TrainState
from warm_python import run_python

KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]

# In an in-memory file system if there is one: a kill leaves the same files there, and fsync costs nothing.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture
def folder(memory: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=memory))


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def all_bits(state: TrainState) -> dict[tuple[str, str], object]:
    return {(group, name): bits(tensor) for group, tensors in state.tensors.items() for name, tensor in tensors.items()}


def small(step: int) -> TrainState:
    weights = {"a": torch.randn(3, 5, generator=torch.Generator().manual_seed(step)), "b": torch.arange(4)}
    return TrainState(step, {"weights": weights, "optimizer": {"step": torch.tensor(float(step))}}, {"phase": "main", "seen": step})


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@given(data=st.data(), shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 2**32))
@settings(max_examples=40)
def test_loaded_state_is_bitwise_equal_to_the_saved_one(data: st.DataObject, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for kind in data.draw(st.lists(st.sampled_from(KINDS), unique=True)):
        size = torch.empty(shape, dtype=kind).numel() * kind.itemsize
        raw = torch.randint(0, 2 if kind == torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
        tensors[f"model.{kind}"] = raw.view(kind).view(shape)  # every bit pattern, including all kinds of NaN
    state = TrainState(7, {"weights": tensors, "nothing": {}}, {"note": "Grüße \ud800", "list": [1, 2.5, None, {"deep": True}]})
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        back = checkpoint.load(checkpoint.save(Path(folder), state))
        assert (back.step, back.numbers, back.tensors.keys()) == (7, state.numbers, state.tensors.keys())
        assert all_bits(back) == all_bits(state)


def test_all_files_are_fsynced_before_the_checkpoint_is_renamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        fsync(handle)
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))

    def noted_rename(old: Path, new: Path) -> None:
        rename(old, new)
        done.append("renamed")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    checkpoint.save(folder, small(3))
    named = done.index("renamed")
    assert set(done[: named - 1]) == {"weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert done[named - 1 :] == [".tmp-step-000003", "renamed", folder.name]


def test_saving_an_existing_step_again_changes_no_file_unless_it_is_damaged(folder: Path) -> None:
    path = checkpoint.save(folder, small(3))
    before = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()}
    assert {file.name for file in before} == {"weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert checkpoint.save(folder, TrainState(3, {"other": {}}, {})) == path
    assert {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()} == before
    (path / "weights.safetensors").write_bytes(b"")
    assert checkpoint.save(folder, small(3)) == path
    assert all_bits(checkpoint.load(path)) == all_bits(small(3))
    (folder / ".tmp-step-000002").mkdir()
    (folder / ".tmp-step-000002" / "weights.safetensors").write_bytes(b"half")
    remove_leftovers(folder)
    assert os.listdir(folder) == ["step-000003"]


def test_nan_in_the_numbers_raises_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(ValueError, match="nan"):
        checkpoint.save(folder / "checkpoints", TrainState(1, {}, {"best": float("nan")}))
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "longer", "a folder"])
def test_damaged_checkpoint_raises_and_is_skipped(folder: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = checkpoint.save(folder, small(1)), checkpoint.save(folder, small(2))
    content = (newer / name).read_bytes()
    if damage == "missing":
        (newer / name).unlink()
    elif damage == "a folder":
        (newer / name).unlink()
        (newer / name).mkdir()
    else:
        (newer / name).write_bytes({"cut": content[:-3], "empty": b"", "longer": content + b"x"}[damage])
    with pytest.raises(ValueError, match=r"step-000002.*use another"):
        checkpoint.load(newer)
    assert checkpoint.latest(folder) == older
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "step-000002" in caplog.text


@pytest.fixture(scope="module")
def pristine(memory: Path) -> Path:
    return checkpoint.save(memory / "pristine", small(2))


@given(data=st.data())
@settings(max_examples=150)
def test_a_flipped_bit_never_changes_what_is_loaded(pristine: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(file.name for file in pristine.iterdir())))
    bit = data.draw(st.integers(0, 8 * (pristine / name).stat().st_size - 1))
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        path = Path(folder) / pristine.name
        shutil.copytree(pristine, path)
        flip(path / name, bit)
        try:
            back = checkpoint.load(path)
        except ValueError:
            return
        assert name == "manifest.json", "a flip may go undetected only in the manifest, if its meaning is the same (white space)"
        assert (back.step, back.numbers, all_bits(back)) == (2, small(2).numbers, all_bits(small(2)))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("weights.safetensors", "../weights.safetensors", "does not describe a checkpoint"),
        ('"format": 1', '"format": 2', "format 2; this version of Retouch reads 1"),
    ],
)
def test_a_manifest_of_another_format_or_with_a_path_outside_the_checkpoint_raises(
    folder: Path, old: str, new: str, says: str
) -> None:
    path = checkpoint.save(folder, small(1))
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, new))
    with pytest.raises(ValueError, match=says):
        checkpoint.load(path)


def test_latest_orders_steps_by_number_and_prune_keeps_other_folders(folder: Path) -> None:
    assert checkpoint.latest(folder / "nowhere") is None
    for step in (2, 999_999, 1_000_000):
        checkpoint.save(folder, small(step))
    for name in ("step-best", "step-9999999.bak", "notes"):
        (folder / name).mkdir()
    assert checkpoint.latest(folder) == folder / "step-1000000"
    checkpoint.prune(folder, 1)
    assert sorted(os.listdir(folder)) == ["notes", "step-1000000", "step-9999999.bak", "step-best"]


@given(good=st.lists(st.booleans(), max_size=6), keep=st.integers(1, 4), every=st.none() | st.integers(1, 3))
@settings(max_examples=60)
def test_prune_keeps_the_newest_the_newest_intact_and_every_nth_checkpoint(good: list[bool], keep: int, every: int | None) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        for step, whole in enumerate(good):
            path = checkpoint.save(folder, TrainState(step, {}, {}))
            if not whole:
                (path / "state.json").unlink()
        checkpoint.prune(folder, keep, keep_every=every)
        newest = set(range(len(good))[-keep:])
        best = {max(step for step, whole in enumerate(good) if whole)} if any(good) else set()
        for_good = set() if every is None else set(range(0, len(good), every))
        assert {int(path.name[5:]) for path in folder.iterdir()} == newest | best | for_good


@pytest.mark.parametrize("limit", [100, 1_000, 12_000])
def test_full_disk_raises_and_leaves_the_previous_checkpoint_intact(folder: Path, limit: int) -> None:
    """The disk is full at the first tensors, at state.json, or at the second tensors after the first were written."""
    checkpoint.save(folder, small(1))
    tensors = {
        "first": {"a": torch.zeros(1 if limit == 1_000 else 2_000)},
        "second": {"a": torch.zeros(1 if limit == 1_000 else 4_000)},
    }
    state = TrainState(2, tensors, {"text": "x" * 2_000})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(ValueError, match=r"could not write the checkpoint .*step-000002: .*File too large.* free some space"):
            checkpoint.save(folder, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(folder) == ["step-000001"]
    assert all_bits(checkpoint.load(folder / "step-000001")) == all_bits(small(1))
    assert all_bits(checkpoint.load(checkpoint.save(folder, state))) == all_bits(state)


def test_kill_at_any_point_of_a_save_loses_no_complete_checkpoint(folder: Path) -> None:
    run_python(Path(__file__).parents[1] / "support" / "kill_saves.py", folder, 0, 40, 20)


def draws() -> list[object]:
    """Some random draws. After an odd number of normal draws, the generators hold the second value of a pair."""
    return [random.gauss(0, 1), random.random(), numpy.random.normal(), numpy.random.bytes(3), torch.randn(3).tolist()]


def test_rng_states_of_python_numpy_and_torch_are_restored(folder: Path) -> None:
    before = checkpoint.rng_state()
    try:
        for _ in range(2):  # with and without the second value of a pair of normal draws
            path = checkpoint.save(folder, TrainState(len(os.listdir(folder)), {"random": checkpoint.rng_state()}, {}))
            expected = [draws(), draws()]
            random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
            checkpoint.restore_rng(checkpoint.load(path).tensors["random"])
            assert [draws(), draws()] == expected
            draws()
    finally:
        checkpoint.restore_rng(before)
    assert all(torch.equal(value, before[name]) or value.isnan() for name, value in checkpoint.rng_state().items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rng_state_of_cuda_is_restored() -> None:
    torch.randn(3, device="cuda")
    state = checkpoint.rng_state()
    expected = torch.randn(5, device="cuda")
    torch.randn(7, device="cuda")
    checkpoint.restore_rng(state)
    assert torch.equal(torch.randn(5, device="cuda"), expected)
