"""The stepper of a policy with a value head: one backward pass, but separate optimizers, learning rates and gradient clipping."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from retouch.distributed.gathering import merged
from retouch.distributed.stepper import ReplicatedStepper, Stepper

_HEAD = "value_head/"
_WEIGHTS = "weights/"


class HeadStepper:
    """Combines the steppers of the policy and of the value head (implements ``retouch.distributed.stepper.Stepper``).

    The head is replicated on every rank and has a constant learning rate. Its weights are part of ``state``, because only training
    uses them; weight copies, exports and inference do not contain the head. ``loss_scale``: the factor by which the policy's
    stepper multiplies losses in its backward pass; the head's gradients are divided by it. ``module`` is the policy's module; the
    head is not wrapped.
    """

    def __init__(self, policy: Stepper, head: ReplicatedStepper, *, learning_rate: float, loss_scale: int = 1) -> None:
        self.module: nn.Module = policy.module
        self.policy = policy
        self.head = head
        self.learning_rate = learning_rate
        self.loss_scale = loss_scale

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss``, this rank's share of the global loss, to the policy and the head."""
        self.policy.backward(loss)

    def step(self, learning_rate: float) -> float:
        """Like ``ReplicatedStepper.step``. The returned norm is the norm of the policy's gradient only."""
        gradients = [parameter.grad for parameter in self.head.parameters.values() if parameter.grad is not None]
        if gradients:  # a phase without a value loss gives the head no gradient
            for gradient in gradients:
                gradient.div_(self.loss_scale)
            # The head steps first, so a non-finite loss changes neither the head nor the policy.
            self.head.step(self.learning_rate)
        return self.policy.step(learning_rate)

    def state(self) -> Mapping[str, Tensor]:
        """Return the policy's state, and under ``value_head/`` the head's weights and optimizer state."""
        weights = {f"{_HEAD}{_WEIGHTS}{name}": tensor for name, tensor in self.head.module.state_dict().items()}
        return merged(self.policy.state(), weights, {f"{_HEAD}{name}": tensor for name, tensor in self.head.state().items()})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``."""
        own = {name.removeprefix(_HEAD): tensor for name, tensor in state.items() if name.startswith(_HEAD)}
        self.policy.load({name: tensor for name, tensor in state.items() if not name.startswith(_HEAD)})
        for name, tensor in self.head.module.state_dict().items():
            tensor.copy_(own.pop(f"{_WEIGHTS}{name}"))
        self.head.load(own)

    def snapshot(self) -> Callable[[], None]:
        """Like ``ReplicatedStepper.snapshot``; includes the head's weights."""
        policy, head = self.policy.snapshot(), self.head.snapshot()
        weights = {name: tensor.to("cpu", copy=True) for name, tensor in self.head.module.state_dict().items()}

        def restore() -> None:
            policy()
            head()
            for name, tensor in self.head.module.state_dict().items():
                tensor.copy_(weights[name])

        return restore
