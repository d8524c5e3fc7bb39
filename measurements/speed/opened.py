"""Builds the run of a recipe like `retouch train`, for training step by step without evaluations and reports."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import load
from retouch.run.build import Assembly, assemble
from retouch.run.ledger import Ledger
from retouch.run.step import Phase, Run

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Opened:
    """A run, its first phase and the parts from which it was built."""

    parts: Assembly
    run: Run
    phase: Phase


@contextmanager
def opened(recipe: str, overrides: Sequence[str] = ()) -> Iterator[Opened]:
    """Build the run of a recipe in ``recipes/``. Its ledger is in a temporary folder, which is removed afterwards."""
    with TemporaryDirectory() as folder, closing(Ledger(Path(folder), Ranks(), keep_images=False, new_judge=False)) as ledger:
        parts = assemble(load(ROOT / "recipes" / recipe, overrides), Ranks(), ledger=ledger)
        try:
            parts.begin(0)
            ledger.attach(parts.judge, since=0)
            run, phase = parts.phase(0, stepper=parts.stepper(), judge=parts.judge.for_split("train"))
            yield Opened(parts, run, phase)
        finally:
            parts.judge.close()
