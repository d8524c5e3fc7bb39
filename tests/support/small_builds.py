"""Builds in small, to be compared with one another."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch


def three(folder: Path, build: Callable[..., Mapping[str, float]], *, measured_by: ModuleType) -> list[Mapping[str, float]]:
    """Two builds of one seed, and one of another, in ``one``, ``two`` and ``other``; the scores of each on a few held-out tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_by, "HELD_OUT", 4)
        patch.setattr(measured_by, "EVAL_STEPS", 1)
        before = torch.get_num_threads()
        scores = [build(folder / name, seed=seed) for name, seed in (("one", 3), ("two", 3), ("other", 4))]
        assert torch.get_num_threads() == before
    return scores
