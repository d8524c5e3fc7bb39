"""A recipe's run, built as `retouch train` builds it, ready to be driven step by step. Nothing is evaluated or reported."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from retouch.assembly.assembly import Assembly, assemble
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import load
from retouch.training.ledger import Ledger
from retouch.training.loop import Phase, Run

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Opened:
    """The first phase of a run and the parts that it is made of."""

    parts: Assembly
    run: Run
    phase: Phase


@contextmanager
def opened(recipe: str, overrides: Sequence[str] = ()) -> Iterator[Opened]:
    """The run of a recipe in ``recipes/``; its ledger lies in a folder that is gone afterwards."""
    with TemporaryDirectory() as folder, closing(Ledger(Path(folder), Ranks(), keep_images=False, new_judge=False)) as ledger:
        parts = assemble(load(ROOT / "recipes" / recipe, overrides), Ranks(), ledger=ledger)
        try:
            parts.begin(0)
            ledger.attach(parts.judge, since=0)
            run, phase = parts.phase(0, stepper=parts.stepper(), judge=parts.judge.for_split("train"))
            yield Opened(parts, run, phase)
        finally:
            parts.judge.close()
