"""A recipe's run, built as `retouch train` builds it, ready to be driven step by step. Nothing is evaluated or reported."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from retouch.loop import Phase, Run
from retouch.runs.assembly import Assembly, assemble
from retouch.runs.journal import Journal, JournaledJudge, journal_path
from retouch.runs.ranks import Ranks
from retouch.runs.recipe import load

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Opened:
    """The first phase of a run and the parts that it is made of."""

    parts: Assembly
    run: Run
    phase: Phase


@contextmanager
def opened(recipe: str, overrides: Sequence[str] = ()) -> Iterator[Opened]:
    """The run of a recipe in ``recipes/``; its journal of scores lies in a folder that is gone afterwards."""
    parts = assemble(load(ROOT / "recipes" / recipe, overrides), Ranks())
    with TemporaryDirectory() as folder:
        judge = JournaledJudge(parts.judge, Journal(journal_path(Path(folder), 0)))
        try:
            parts.begin(0)
            run, phase = parts.phase(0, stepper=parts.stepper(), judge=judge)
            yield Opened(parts, run, phase)
        finally:
            parts.judge.close()
            judge.close()
