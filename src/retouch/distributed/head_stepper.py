"""A value head's optimizer beside the policy's: one backward for both, each with its own learning rate and clipping."""

from collections.abc import Mapping

from torch import Tensor, nn

from retouch.distributed.stepper import ReplicatedStepper, Stepper

_HEAD = "value_head/"
_WEIGHTS = "weights/"


class HeadStepper:
    """The policy's stepper and the head's (implements ``retouch.distributed.stepper.Stepper``).

    Every rank holds the head whole, and its learning rate stays. The head's weights are part of the state, since training alone has
    a use for them: copies, exports and those who only sample know nothing of it. ``loss_times``: what the policy's stepper
    multiplies losses by in its backward. ``module`` is the policy's; the head has no wrapper.
    """

    def __init__(self, policy: Stepper, head: ReplicatedStepper, *, learning_rate: float, loss_times: int = 1) -> None:
        self.module: nn.Module = policy.module
        self.policy = policy
        self.head = head
        self.learning_rate = learning_rate
        self.loss_times = loss_times

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's share to both."""
        self.policy.backward(loss)

    def step(self, learning_rate: float) -> float:
        """As ``ReplicatedStepper.step``, of the policy; the norm is of its gradient alone."""
        gradients = [parameter.grad for parameter in self.head.parameters.values() if parameter.grad is not None]
        if gradients:  # none in a phase without values
            for gradient in gradients:
                gradient.div_(self.loss_times)
            # First, so that a loss that is no number changes neither.
            self.head.step(self.learning_rate)
        return self.policy.step(learning_rate)

    def state(self) -> dict[str, Tensor]:
        """The policy's, and under names of their own the head's weights and moments."""
        weights = {f"{_HEAD}{_WEIGHTS}{name}": tensor for name, tensor in self.head.module.state_dict().items()}
        return {**self.policy.state(), **weights, **{f"{_HEAD}{name}": tensor for name, tensor in self.head.state().items()}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave."""
        own = {name.removeprefix(_HEAD): tensor for name, tensor in state.items() if name.startswith(_HEAD)}
        self.policy.load({name: tensor for name, tensor in state.items() if not name.startswith(_HEAD)})
        for name, tensor in self.head.module.state_dict().items():
            tensor.copy_(own.pop(f"{_WEIGHTS}{name}"))
        self.head.load(own)
