"""Building the playground's base writer: the same bits from the same seed."""

from functools import partial
from pathlib import Path

import pytest

from retouch_worlds.pretraining import writer as building
from retouch_worlds.pretraining.writer import WriterRound, WriterTraining, build_writer
from small_builds import build_three

ROUNDS = (WriterRound(2, 2e-3, (1,)), WriterRound(2, 1e-3, (1, 2), distillation=1.0))
TINY = WriterTraining(rounds=ROUNDS, batch=4, warmup=1)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    for scores in build_three(tmp_path, partial(build_writer, writer=TINY), measured_by=building):
        assert len(scores) == 2 * 2 * 4
        assert all(0 <= score <= 10 for score in scores.values())
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
