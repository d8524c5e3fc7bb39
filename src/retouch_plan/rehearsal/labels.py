"""Labels of a rehearsal's tensors: weights by part, gradients, copies, master weights, moments, and activations of frozen parts."""

from typing import Any

from torch import Tensor, nn

from retouch.distributed.stepper import HeadStepper, ReplicatedStepper, Stepper
from retouch.protocols import DenoisingModel
from retouch.run.build import Assembly
from retouch_plan.rehearsal.counting.meter import Meter
from retouch_plan.rehearsal.repeats import Repeats

_TEXT = "text encoders"
_LABELS = {"vae": "autoencoder", **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), _TEXT)}


class Labels:
    """Gives tensors of a run the labels under which ``meter`` counts them. ``repeats``: runs equal layers of text encoders once."""

    def __init__(self, meter: Meter, repeats: Repeats) -> None:
        self.meter = meter
        self.repeats = repeats
        self._met: set[nn.Module] = set()

    def module(self, name: str, module: nn.Module) -> None:
        """Label the weights and activations of a part of a model, when it is loaded and again when its weights were moved."""
        self.meter.relabel(list(module.parameters()), f"weights: {name}")
        label = _LABELS.get(name)
        if label is not None and module not in self._met:
            self._met.add(module)
            self.meter.label_module(module, f"activations: {label}")
            if label == _TEXT:
                self.repeats.layers(module)

    def weights(self, parts: Assembly) -> None:
        """Label trained weights, their copies and their gradients, and the weights of a denoising model."""
        if isinstance(parts.model, DenoisingModel):  # its weights may have been moved after loading
            self.meter.relabel(list(parts.model.module.parameters()), "weights: transformer")
        trained = list(parts.copies.parameters.values())
        self.meter.relabel(trained, "trained weights")
        for copy in parts.copies.copies.values():
            self.meter.relabel(list(copy.values()), "copies of the trained weights")
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda each: self.meter.relabel([each.grad], "gradients"))

    def master_weights(self, stepper: Stepper) -> None:
        """Label fp32 master weights of weights in 16 bits, and their gradients, which the stepper accumulates without a hook."""
        own = stepper.policy if isinstance(stepper, HeadStepper) else stepper
        if not isinstance(own, ReplicatedStepper):
            return
        masters = [weight for name, weight in own.weights.items() if weight is not own.parameters[name]]
        self.meter.relabel(masters, "master weights")
        backward = own.backward

        def labelled(loss: Tensor) -> None:
            backward(loss)
            self.meter.relabel([weight.grad for weight in masters], "gradients")

        own.backward = labelled  # type: ignore[method-assign]

    def moments(self, stepper: Any) -> None:
        """Label AdamW's moments, which exist after the first optimizer step."""
        engine = getattr(stepper, "engine", stepper)
        optimizer = getattr(getattr(engine, "optimizer", None), "optimizer", getattr(engine, "optimizer", None))
        if optimizer is not None:
            for state in optimizer.state.values():
                self.meter.relabel([each for each in state.values() if isinstance(each, Tensor)], "AdamW's moments")
