"""Who reads a response for the image model: a frozen encoder, or the policy that wrote it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from transformers import Qwen2_5_VLForConditionalGeneration


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A Qwen2.5-VL that reads responses, in eval mode and without gradient.

    ``published`` opens a block in which ``module`` computes with the weights that the image model was trained with. The branch
    that guidance steers away from is read in it, so that it stands still whatever is trained. ``reading`` is opened around
    everything that is read.
    """

    module: Qwen2_5_VLForConditionalGeneration
    published: Callable[[], AbstractContextManager[None]] = nullcontext
    reading: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def frozen(cls, module: Qwen2_5_VLForConditionalGeneration) -> "Encoder":
        """An encoder of its own, which is frozen by this: a picture depends on what was written alone."""
        module.requires_grad_(False).eval()
        return cls(module)

    @classmethod
    def below(
        cls, module: Qwen2_5_VLForConditionalGeneration, *, published: Callable[[], AbstractContextManager[None]]
    ) -> "Encoder":
        """A frozen encoder that is held once with the policy: what lies below its adapter, which ``published`` takes off."""
        return cls(module, published, published)

    @classmethod
    def policy(
        cls, module: Qwen2_5_VLForConditionalGeneration, *, published: Callable[[], AbstractContextManager[None]]
    ) -> "Encoder":
        """The weights under training, with their adapter on: pictures move with them. They are held once.

        ``published``: ``functools.partial(copies.using, "reference")``, say.
        """
        return cls(module, published)
