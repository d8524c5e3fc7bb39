"""What a checkpoint holds of a run, and how a run takes it back."""

import torch

from retouch.policies.weights import WeightCopies
from retouch.runs import checkpoint
from retouch.runs.assembly import Assembly
from retouch.runs.checkpoint import State
from retouch.runs.stepper import Stepper


def capture(parts: Assembly, stepper: Stepper, *, step: int) -> State:
    """Everything from which the run goes on to the same bits: weights, optimizer, copies, global generators.

    Schedules, samplers and noise are functions of the step and the recipe's seed, so there is nothing of theirs to keep.
    """
    tensors = {
        "weights": {name: parameter.detach() for name, parameter in parts.copies.parameters.items()},
        "optimizer": stepper.state(),
        "copies": parts.copies.state(),
        "random": checkpoint.rng_state(),
    }
    return State(step=step, tensors=tensors, numbers={"world": parts.ranks.world})


def restore_weights(copies: WeightCopies, state: State) -> None:
    """The trained weights and their copies. ValueError where the checkpoint is of other weights."""
    trained = copies.parameters
    if trained.keys() != state.tensors["weights"].keys():
        raise ValueError(f"the checkpoint of step {state.step} holds other weights than the recipe trains")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(state.tensors["weights"][name])
    copies.load(state.tensors["copies"])


def restore(parts: Assembly, state: State, stepper: Stepper) -> None:
    """All that ``capture`` took."""
    restore_weights(parts.copies, state)
    stepper.load(state.tensors["optimizer"])
    checkpoint.restore_rng(state.tensors["random"])
