"""What a checkpoint holds of a run, and how a run takes it back."""

from collections.abc import Mapping

from torch import Tensor

from retouch.assembly.assembly import Assembly
from retouch.distributed.ranks import Ranks
from retouch.distributed.sharded_copies import fill_shards, full_tensor
from retouch.distributed.stepper import Stepper
from retouch.policies.weights import WeightCopies
from retouch.training import checkpoint
from retouch.training.checkpoint import TrainState

GROUPS = ("weights", "optimizer", "copies", "random")


def capture(parts: Assembly, stepper: Stepper, *, step: int) -> TrainState:
    """Everything from which the run goes on to the same bits: weights, optimizer, copies, each rank's global generators. All ranks
    call it; what they share among them comes whole.

    Schedules, samplers and noise are functions of the step and the recipe's seed, so there is nothing of theirs to keep.
    """
    found: tuple[Mapping[str, Tensor], ...] = (
        {name: full_tensor(parameter.detach()) for name, parameter in parts.copies.parameters.items()},
        stepper.state(),
        parts.copies.state(),
        _generators(parts.ranks),
    )
    tensors = dict(zip(GROUPS, found, strict=True))
    return TrainState(step=step, tensors=tensors, numbers={"world": parts.ranks.world})


def restore_weights(copies: WeightCopies, state: TrainState) -> None:
    """The trained weights and their copies. Raises ValueError if the checkpoint is of other weights."""
    trained = copies.parameters
    if trained.keys() != state.tensors["weights"].keys():
        raise ValueError(f"the checkpoint of step {state.step} holds other weights than the recipe trains")
    for name, parameter in trained.items():
        fill_shards(parameter, state.tensors["weights"][name])
    copies.load(state.tensors["copies"])


def restore(parts: Assembly, state: TrainState, stepper: Stepper) -> None:
    """All that ``capture`` took."""
    restore_weights(parts.copies, state)
    stepper.load(state.tensors["optimizer"])
    _set_generators(parts.ranks, state.tensors["random"])


def _generators(ranks: Ranks) -> dict[str, Tensor]:
    """The state of every rank's global generators, those of ranks after the first under ``<rank>/<name>``."""
    found = {}
    for name, mine in checkpoint.rng_state().items():
        for rank, theirs in enumerate(ranks.gather(mine[None])):
            found[f"{rank}/{name}" if rank else name] = theirs.clone()
    return found


def _set_generators(ranks: Ranks, state: Mapping[str, Tensor]) -> None:
    """This rank's own, where the checkpoint has them; a rank that was not there goes on as it began."""
    mine = f"{ranks.rank}/" if ranks.rank else ""
    own = {
        name.removeprefix(mine): tensor for name, tensor in state.items() if name.startswith(mine) and ("/" in name) == bool(mine)
    }
    if own:
        checkpoint.restore_rng(own)
