"""Building the playground's base writer: the same bits from the same seed."""

from pathlib import Path

import pytest
import torch

from retouch.bases import build_writer as building
from retouch.bases.build_writer import build_writer
from retouch.bases.writer import Round, WriterTraining

ROUNDS = (Round(2, 2e-3, (1,)), Round(2, 1e-3, (1, 2), legible=1.0))
TINY = WriterTraining(rounds=ROUNDS, batch=4, warmup=1)


def test_the_same_seed_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "HELD_OUT", 4)
    monkeypatch.setattr(building, "EVAL_STEPS", 1)
    before = torch.get_num_threads()
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        scores = build_writer(tmp_path / name, seed=seed, writer=TINY)
        assert len(scores) == 2 * 2 * 4
        assert all(0 <= score <= 10 for score in scores.values())
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
    assert torch.get_num_threads() == before
