"""Builds small versions of a playground model several times, to compare them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch


def build_three(folder: Path, build: Callable[..., Mapping[str, float]], *, measured_by: ModuleType) -> list[Mapping[str, float]]:
    """Build twice with one seed and once with another, in ``one``, ``two``, ``other``; return the scores on 4 held-out tasks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_by, "HELD_OUT", 4)
        patch.setattr(measured_by, "EVAL_STEPS", 1)
        before = torch.get_num_threads()
        scores = [build(folder / name, seed=seed) for name, seed in (("one", 3), ("two", 3), ("other", 4))]
        assert torch.get_num_threads() == before
    return scores
