"""Captures the state of a run for a checkpoint, and restores it."""

from collections.abc import Mapping

from torch import Tensor

from retouch.data.sampler import UnindexedTasks
from retouch.distributed.ranks import Ranks
from retouch.distributed.sharded_copies import fill_shards, gathered_state
from retouch.distributed.stepper import Stepper
from retouch.policies.weights import WeightCopies
from retouch.run import checkpoint
from retouch.run.build import Assembly
from retouch.run.checkpoint import TrainState
from retouch.types import Json

GROUPS = ("weights", "optimizer", "copies", "random")


def capture(parts: Assembly, stepper: Stepper, *, step: int) -> TrainState:
    """Return the state from which the run continues bit for bit: weights, optimizer, copies, and each rank's global generators.

    All ranks must call it. Sharded tensors are gathered one at a time when they are read, so all ranks must call
    ``checkpoint.save`` or ``checkpoint.send`` before the next step.

    Schedules, samplers and noise depend only on the step and the recipe's seed, so they have no state. Data streams store their
    position, which only avoids reading their rows from the start.
    """
    found: tuple[Mapping[str, Tensor], ...] = (
        gathered_state(parts.copies.parameters, parts.ranks),
        stepper.state(),
        parts.copies.state(),
        _generators(parts.ranks),
    )
    tensors = dict(zip(GROUPS, found, strict=True))
    numbers: dict[str, Json] = {"world": parts.ranks.world}
    streams = [sets.train.state() if isinstance(sets.train, UnindexedTasks) else None for sets in parts.sets]
    if any(state is not None for state in streams):
        numbers["streams"] = streams
    return TrainState(step=step, tensors=tensors, numbers=numbers)


def restore_weights(copies: WeightCopies, state: TrainState) -> None:
    """Restore the trained weights and their copies. Raises ValueError if the checkpoint contains other weights."""
    trained = copies.parameters
    if trained.keys() != state.tensors["weights"].keys():
        raise ValueError(f"the checkpoint of step {state.step} has other weights than the recipe trains")
    for name, parameter in trained.items():
        fill_shards(parameter, state.tensors["weights"][name])
    copies.load(state.tensors["copies"])


def restore(parts: Assembly, state: TrainState, stepper: Stepper) -> None:
    """Restore everything that ``capture`` captured."""
    restore_weights(parts.copies, state)
    stepper.load(state.tensors["optimizer"])
    streams = state.numbers.get("streams")
    for sets, stored in zip(parts.sets, streams if isinstance(streams, list) else (), strict=False):
        if isinstance(sets.train, UnindexedTasks):
            sets.train.load_state(stored)
    _set_generators(parts.ranks, state.tensors["random"])


def _generators(ranks: Ranks) -> dict[str, Tensor]:
    """Return the states of the global generators of all ranks; for ranks after the first, under ``<rank>/<name>``."""
    found = {}
    for name, mine in checkpoint.rng_state().items():
        for rank, theirs in enumerate(ranks.gather(mine[None])):
            found[f"{rank}/{name}" if rank else name] = theirs.clone()
    return found


def _set_generators(ranks: Ranks, state: Mapping[str, Tensor]) -> None:
    """Restore this rank's generators. A rank that is not in the checkpoint keeps its current states."""
    mine = f"{ranks.rank}/" if ranks.rank else ""
    own = {
        name.removeprefix(mine): tensor for name, tensor in state.items() if name.startswith(mine) and ("/" in name) == bool(mine)
    }
    if own:
        checkpoint.restore_rng(own)
