"""Trains an image model together with its text encoder, with the library's own training loop and objective.

Unlike in a run, the text encoder is trained too. The result is the running average of the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retouch.models.common.wrappers import ModelWrapper
from retouch.models.qwen_image.model import Prepared, QwenFlow
from retouch.objectives.imitation import Supervised
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import ODETransition
from retouch.policies.weights import WeightCopies
from retouch.protocols import DenoisingModel
from retouch.types import Batch, Conditioning, Task
from retouch_worlds.pretraining.supervised import train_on_demonstrations

NO_INSTRUCTION = " "


class JointModel(ModelWrapper[QwenFlow]):
    """A Qwen-Image or Qwen-Image-Edit model whose text encoder is trained together with the transformer.

    Its conditioning contains the inputs of the text encoder; ``velocity`` embeds them, with gradient.
    """

    def __init__(self, model: QwenFlow) -> None:
        super().__init__(model)
        self.module = nn.ModuleDict({"transformer": model.module, "text_encoder": model.text.encoder})

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        prepared = self.model.prepare(tasks)
        tensors = dict(prepared.tokens)
        if prepared.source is not None:
            tensors["pixel_values"] = tensors["pixel_values"].unflatten(0, (len(tasks), -1))
            tensors["source"] = prepared.source
        return Conditioning(tensors, frozenset({"input_ids", "attention_mask"}), prepared.shared)

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r s d"]:
        tokens = dict(conditioning.tensors)
        source = tokens.pop("source", None)
        if source is not None:
            tokens["pixel_values"] = tokens["pixel_values"].flatten(0, 1)
        embedded = self.model.embed(Prepared(tokens, source, conditioning.shared))
        return self.model.velocity(module.get_submodule("transformer"), x, sigma, embedded)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return self.encode([replace(task, instruction=NO_INSTRUCTION) for task in tasks])


def train_jointly(
    joint: DenoisingModel,
    batch: Callable[[int], Batch],
    *,
    rows: int,
    steps: int,
    learning_rate: float,
    warmup: int,
    shift: float,
    average_decay: float,
    log: Callable[[str], None],
) -> None:
    """Train on ``steps`` batches of ``rows`` tasks. The final weights equal the weights that are saved to a folder (the transformer
    is rounded to half precision), so that training can continue from a folder.

    ``joint``: a model whose module has the ``transformer`` and the other trained modules, as in ``JointModel``. ``learning_rate``:
    the peak, which is reached after ``warmup`` steps; the learning rate then falls to 0 along a cosine. ``log``: called with each
    line of progress."""
    joint.module.requires_grad_(True)
    copies = WeightCopies(joint.module)
    copies.snapshot("average")
    sampling = DenoisingRollout(num_steps=1, transition=ODETransition())
    train_on_demonstrations(
        DenoisingPolicy(joint, sampling=sampling, eval_steps=1, microbatch=rows, copies=copies),
        batch,
        objective=Supervised(sigma_sampling="uniform", shift=shift),
        normalise="sequence",
        rows=rows,
        steps=steps,
        learning_rate=learning_rate,
        warmup=warmup,
        second_beta=0.99,
        log=log,
        average=lambda taken: copies.update_ema("average", min((1 + taken) / (10 + taken), average_decay)),
    )
    with torch.no_grad():
        for name, parameter in copies.parameters.items():
            average = copies.copies["average"][name]
            parameter.copy_(average.half() if name.startswith("transformer.") else average)
    joint.module.requires_grad_(False).eval()


def with_blank_instructions(tasks: Sequence[Task], share: float, random: torch.Generator) -> list[Task]:
    """The tasks, a ``share`` of them with a blank instruction, which training for classifier-free guidance needs."""
    blank = torch.rand(len(tasks), generator=random) < share
    return [replace(task, instruction=NO_INSTRUCTION) if empty else task for task, empty in zip(tasks, blank, strict=True)]
