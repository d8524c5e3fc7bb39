"""What writes while a writer learns, from what a recipe says of it."""

import logging
import shutil
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.distributed.ranks import Ranks
from retouch.models.common.lora_files import write_lora
from retouch.policies.autoregressive.decoding import CachedDecoding, Engine
from retouch.policies.autoregressive.mismatch import Tolerance
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel
from retouch.recipe.engine import CachedEngine, VllmEngine

if TYPE_CHECKING:
    from retouch.policies.engines.client import Client

log = logging.getLogger("retouch")


@dataclass(frozen=True)
class Writing:
    """An engine, and how far it may be off."""

    engine: Engine
    tolerance: Tolerance


def build_engine(
    section: CachedEngine | VllmEngine | None, *, model: AutoregressiveModel, copies: WeightCopies, ranks: Ranks, folder: Path
) -> Writing:
    """The engine of a rollout; ``folder``: of the run. ValueError where it cannot write for this model."""
    said = CachedEngine(kind="cached") if section is None else section
    tolerance = Tolerance(limit=said.max_mismatch, cap=said.truncate_at, any_rank=ranks.any)
    if isinstance(said, CachedEngine):
        return Writing(CachedDecoding(model), tolerance)
    return Writing(_server(said, model=model, copies=copies, ranks=ranks, run=folder), tolerance)


def connect(section: VllmEngine) -> "Client":
    """A new connection to the server. ValueError where httpx is not installed."""
    try:
        from retouch.policies.engines.client import Client
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise ValueError("asking a vLLM server needs httpx: pip install 'retouch[vllm]'") from None
    return Client(section.url, seconds=section.timeout, patience=section.patience)


def _server(section: VllmEngine, *, model: AutoregressiveModel, copies: WeightCopies, ranks: Ranks, run: Path) -> Engine:
    connect(section).close()  # httpx is here
    from retouch.policies.engines import adapters, engine, wire

    if not isinstance(model, engine.Served):
        raise ValueError(
            f"rollout.engine.kind: vllm sends pictures as the writer sees them, and {type(model).__name__} has no `seen`; "
            "see retouch.policies.engines.engine.Served, or take cached"
        )
    log.warning(
        "rollout.engine: written for vLLM %s and tested against a double of its interface; never run on vLLM", wire.INTERFACE
    )
    module: Any = model.module
    folder = run / "adapters" if section.adapters is None else Path(section.adapters)
    made = engine.VllmEngine(
        model,
        connect=partial(connect, section),
        adapters=adapters.Adapters(
            weights=copies.parameters,
            save=lambda path: write_lora(module, path, pipeline=None),
            folder=folder,
            name=f"retouch-{run.name}",
            first=ranks.is_main,
            any_rank=ranks.any,
        ),
        any_rank=ranks.any,
    )
    if section.adapters is None and ranks.is_main:
        _clear(folder)
        weakref.finalize(made, _clear, folder)
    return made


def _clear(folder: Path) -> None:
    """What an engine left behind, and the run's folder where it holds nothing else, since only the doctor was here."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
