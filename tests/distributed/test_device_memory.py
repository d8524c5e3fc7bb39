"""The memory of a run's devices: the peak of each step by device, a limit, and emptying of the cache."""

import json
from pathlib import Path

import pytest
import torch

from retouch.distributed.ranks import DeviceMemory, Placement, Ranks, limit_memory, peak_bytes
from retouch.recipe.document import apply
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from tiny_recipes import SMALL

CPU = torch.device("cpu")
THREE = Placement(*(torch.device("cuda", index) for index in range(3)))


class Gpus:
    """Replaces the functions of torch.cuda that are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peaks = {index: 10**9 * (index + 1) for index in range(3)}
        self.emptied = 0
        self.limits: dict[int, float] = {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peaks[device.index])
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.peaks.update({device.index: 0}))
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: self._limit(share, device))

    def _empty(self) -> None:
        self.emptied += 1

    def _limit(self, share: float, device: torch.device) -> None:
        self.limits[device.index] = share


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def test_peak_memory_is_reported_per_device_and_step(gpus: Gpus) -> None:
    memory = DeviceMemory(Ranks(), THREE, Devices())
    assert memory.after_step(1) == {"memory/peak_gb/policy": 1.0, "memory/peak_gb/renderer": 2.0, "memory/peak_gb/reward": 3.0}
    gpus.peaks[1] = 5 * 10**8
    assert memory.after_step(2) == {"memory/peak_gb/policy": 0.0, "memory/peak_gb/renderer": 0.5, "memory/peak_gb/reward": 0.0}


def test_single_device_reports_one_peak() -> None:
    found = DeviceMemory(Ranks(), Placement(CPU, CPU, CPU), None).after_step(1)
    assert list(found) == ["memory/peak_gb"]
    assert found["memory/peak_gb"] == pytest.approx(peak_bytes(CPU) / 1e9, rel=0.05)
    assert found["memory/peak_gb"] > 0.05  # torch alone takes that


def test_cache_is_emptied_at_the_interval_of_the_recipe_and_never_by_default(gpus: Gpus) -> None:
    for every, times in ((None, 0), (5, 2), (3, 4)):
        gpus.emptied = 0
        memory = DeviceMemory(Ranks(), THREE, Devices(empty_cache_every=every))
        for done in range(1, 13):
            memory.after_step(done)
        assert gpus.emptied == times


def test_memory_fraction_limits_every_gpu_of_the_rank_and_is_off_by_default(gpus: Gpus) -> None:
    limit_memory(None, THREE)
    limit_memory(Devices(), THREE)
    assert gpus.limits == {}
    limit_memory(Devices(memory_fraction=0.85), Placement(THREE.policy, THREE.renderer, CPU))
    assert gpus.limits == {0: 0.85, 1: 0.85}


def test_peak_memory_is_logged_with_timings_and_not_with_metrics(tmp_path: Path) -> None:
    recipe = parse(apply(SMALL, [f"out={tmp_path}", "steps=1", "trackers=[]"]))
    assert run(recipe, fresh=False) == 0
    folder = RunFolder(recipe.folder)
    (times,) = map(json.loads, folder.timings.read_text().splitlines())
    assert times["memory/peak_gb"] > 0
    assert not any(name.startswith("memory/") for name in folder.read_metrics()[0])
