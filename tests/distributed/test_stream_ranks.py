"""Two real ranks read a stream: together they read every row once per pass, and the same rows after resuming."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import stream_ranks
from retouch.data.base import DataContext
from retouch.data.tasks import UnindexedTasks
from warm_python import run_python

SUPPORT = Path(__file__).parents[1] / "support"


def launch(out: Path, *, stop: int = 0) -> None:
    out.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run_python(*launcher, SUPPORT / "stream_ranks.py", out, stop, search=[SUPPORT], timeout=600, OMP_NUM_THREADS="1")


def steps_of(out: Path, rank: int) -> list[list[str]]:
    """The rows that a rank trained on in each step, each once for all samples of its group."""
    rows = (out / f"rows.{rank}.txt").read_text().splitlines()
    trained = [row for row in rows if int(row.removeprefix("row ")) >= stream_ranks.HELD]
    share = stream_ranks.COUNT * stream_ranks.GROUP // 2
    return [trained[first : first + share : stream_ranks.GROUP] for first in range(0, len(trained), share)]


def bits(out: Path) -> tuple[str, dict[str, torch.Tensor]]:
    newest = max((out / "run" / "checkpoints").glob("step-*"))
    tensors = {f"{file.stem}/{name}": each for file in newest.glob("*.safetensors") for name, each in load_file(file).items()}
    tensors = {name: each for name, each in tensors.items() if not name.endswith("python")}  # beartype uses Python's generator
    return (out / "run" / "metrics.jsonl").read_text(), tensors


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stops in the middle of the first pass over the stream, and continues."""
    out = tmp_path_factory.mktemp("ranks") / "parts"
    launch(out, stop=2)
    assert [len(steps_of(out, rank)) for rank in (0, 1)] == [2, 2]
    launch(out)
    return out


@pytest.mark.slow
def test_two_ranks_together_draw_the_rows_of_one_process_also_after_resuming(parts: Path) -> None:
    train = stream_ranks.stream().build(DataContext()).train
    assert isinstance(train, UnindexedTasks)
    count, places = stream_ranks.COUNT, range(stream_ranks.COUNT)
    drawn = [train.at_step(step, count=count, places=places) for step in range(stream_ranks.STEPS)]
    alone = [[tasks[place].instruction for place in places] for tasks in drawn]
    train.close()
    first, second = (steps_of(parts, rank) for rank in (0, 1))
    assert [[*one, *other] for one, other in zip(first, second, strict=True)] == alone
    rows = [row for step in alone for row in step]
    size = stream_ranks.ROWS - stream_ranks.HELD
    passes = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
    assert len(passes) == 2
    assert all(sorted(each) == sorted(f"row {number}" for number in range(stream_ranks.HELD, stream_ranks.ROWS)) for each in passes)


@pytest.mark.slow
def test_two_ranks_on_a_stream_resume_bitwise(parts: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    launch(whole)
    (metrics, tensors), (others, same) = bits(whole), bits(parts)
    assert metrics == others
    assert [name for name in tensors if not torch.equal(tensors[name].nan_to_num(7), same[name].nan_to_num(7))] == []
