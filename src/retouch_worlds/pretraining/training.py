"""What all builds of base models share: supervised training with the library's own loop and objectives, held-out means, and the
record of a build."""

import copy
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retouch.distributed.optimizer import ReplicatedStepper
from retouch.distributed.ranks import Ranks
from retouch.models.pipeline import ModelWrapper
from retouch.objectives.base import Objective
from retouch.objectives.imitation import CrossEntropy, Supervised
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import DenoisingRollout, ODETransition, TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer, Reward
from retouch.records import files
from retouch.rewards.judging import RewardScorer
from retouch.run.build import has_demonstration
from retouch.run.evaluation import EvaluationResult, Evaluator
from retouch.run.metrics import Clock
from retouch.run.step import Phase, Run, train
from retouch.types import Batch, Conditioning, Task
from retouch_models.qwen_image.model import Prepared, QwenFlow

T = TypeVar("T")
log = logging.getLogger("retouch")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What trainings with the library's loop have in common. ``batch``: the number of tasks per step. ``warmup``: the steps after
    which the learning rate reaches its peak; it then falls to 0 along a cosine."""

    seed: int = 0
    batch: int = 32
    warmup: int = 50


@dataclass(frozen=True, kw_only=True)
class JointTraining(Training):
    """Supervised flow matching of a transformer together with its text encoder, with a running average of the weights."""

    batch: int = 64
    warmup: int = 100
    average_decay: float = 0.997
    shift: float = 3.0


def train_on_demonstrations(
    policy: Any,
    batch: Callable[[int], Batch],
    settings: Training,
    *,
    objective: Objective,
    steps: int,
    learning_rate: float,
    second_beta: float,
    name: str,
    average: Callable[[int], None] = lambda taken: None,
) -> None:
    """Train all weights of the policy on ``steps`` batches. ``learning_rate``: the peak. ``second_beta``: the second beta of AdamW.
    ``name``: written before each line of progress. ``average``: called after each step with the number of steps so far."""
    ranks, rows, warmup = Ranks(), settings.batch, settings.warmup
    run = Run(
        policy=policy,
        renderer=lambda tasks, trajectory: _not_used(),
        judge=_not_used,
        stepper=ReplicatedStepper(policy.module, ranks, betas=(0.9, second_beta), weight_decay=0.01),
        ranks=ranks,
        chunk=rows,
        max_missing=0.0,
        average=average,
        clock=Clock(),
    )
    phase = Phase(
        name="supervised",
        steps=range(steps),
        objective=objective,
        batch=batch,
        order=torch.arange(rows),
        group=torch.arange(rows),
        advantage=None,
        epochs=1,
        minibatches=1,
        learning_rate=lambda step: learning_rate * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    for step, _, metrics in train(run, phase, start=0):
        if step % 50 == 0 or step == steps - 1:
            values = [f"{name} {metrics[f'policy/{name}']:.4f}" for name in ("loss", "distance") if f"policy/{name}" in metrics]
            log.info("%s", "  ".join([f"{name} step {step}/{steps}", *values]))


def train_on_completions(
    writer: AutoregressiveModel,
    tasks: Sequence[Task],
    settings: Training,
    *,
    steps: int,
    learning_rate: float,
    longest: int,
    seed: int,
    name: str,
    objective: Objective | None = None,
) -> None:
    """Train all weights of the writer on ``tasks``, in their order. ``longest``: the largest number of tokens of a completion.
    ``seed``: of the batches. ``objective``: None uses cross-entropy."""
    module, rows = writer.module.requires_grad_(True), settings.batch
    sampling = TokenRollout(max_new_tokens=longest)
    train_on_demonstrations(
        AutoregressivePolicy(writer, sampling=sampling, microbatch=rows, copies=WeightCopies(module)),
        lambda step: ungrouped_batch(tasks[step * rows : (step + 1) * rows], seed=seed, step=step),
        settings,
        objective=CrossEntropy() if objective is None else objective,
        steps=steps,
        learning_rate=learning_rate,
        second_beta=0.98,
        name=name,
    )
    module.requires_grad_(False).eval()


def evaluation_policy(model: DenoisingModel, *, steps: int, batch: int) -> DenoisingPolicy:
    """The model as a policy that only evaluates, in ``steps`` steps."""
    sampling = DenoisingRollout(num_steps=steps, transition=ODETransition())
    return DenoisingPolicy(model, sampling=sampling, eval_steps=steps, microbatch=batch, copies=WeightCopies(model.module))


def ungrouped_batch(tasks: Sequence[Task], *, seed: int, step: int) -> Batch:
    """A batch in which every task is a group of one sample."""
    ids = tuple(range(len(tasks)))
    return Batch(seed=seed, step=step, tasks=tuple(tasks), group_ids=ids, group=ids, slot=(0,) * len(tasks))


def _not_used(*_: Any) -> Any:
    raise AssertionError("supervised training renders and scores nothing")


def one_cycle(
    parameters: Iterable[nn.Parameter], learning_rate: float, steps: int, *, betas: tuple[float, float] = (0.9, 0.999)
) -> Callable[[Tensor], None]:
    """AdamW with a one-cycle schedule. Returns a function that takes a loss and performs one step."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=1e-4, betas=betas)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)

    def advance(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()

    return advance


def with_unit_gain(module: nn.Module) -> None:
    """Initialise the convolutions so that each preserves the variance of its input.

    The default initialisation counts all three temporal taps, but an image uses only the last tap. So activations would shrink from
    layer to layer, and training would start many times slower."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Conv3d)):
            assert part.bias is not None
            nn.init.zeros_(part.bias)
            if isinstance(part, nn.Conv3d):
                nn.init.zeros_(part.weight)
            nn.init.kaiming_normal_(part.weight[:, :, -1] if isinstance(part, nn.Conv3d) else part.weight, nonlinearity="linear")


# Image models together with their text encoders


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
    settings: JointTraining,
    *,
    steps: int,
    learning_rate: float,
    name: str,
) -> None:
    """Train on ``steps`` batches. The final weights equal the weights that are saved to a folder (the transformer is rounded to
    half precision), so that training can continue from a folder. ``joint``: a model whose module has the ``transformer`` and the
    other trained modules, as in ``JointModel``."""
    joint.module.requires_grad_(True)
    copies = WeightCopies(joint.module)
    copies.snapshot("average")
    sampling = DenoisingRollout(num_steps=1, transition=ODETransition())
    train_on_demonstrations(
        DenoisingPolicy(joint, sampling=sampling, eval_steps=1, microbatch=settings.batch, copies=copies),
        batch,
        settings,
        objective=Supervised(sigma_sampling="uniform", shift=settings.shift),
        steps=steps,
        learning_rate=learning_rate,
        second_beta=0.99,
        name=name,
        average=lambda taken: copies.update_ema("average", min((1 + taken) / (10 + taken), settings.average_decay)),
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


# Builds


def build(
    folders: Sequence[Path],
    train: Callable[[], T],
    finish: Callable[[T], dict[str, float]],
    *,
    seed: int,
    command: str | None = None,
) -> dict[str, float]:
    """Train models, write and measure them (``finish``), and write the held-out means, the seed and the command to ``build.json``
    of each folder. Returns the means. It trains with one thread, so that the bits do not depend on the number of cores."""
    began, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trained = train()
    finally:
        torch.set_num_threads(threads)
    scores = finish(trained)
    origin = {"seed": seed} if command is None else {"command": f"{command} --seed {seed}", "seed": seed}
    for folder in folders:
        files.write_json(folder / "build.json", {**origin, "held_out": scores})
    log.info("built in %.0f s: %s", time.perf_counter() - began, ", ".join(map(str, folders)))
    width = max(map(len, scores))
    for name, value in scores.items():
        log.info("  %-*s %.3f", width, name, value)
    return scores


def held_out(
    policy: Any,
    *,
    tasks: Sequence[Task],
    renderer: Renderer,
    reward: Reward,
    column: str,
) -> tuple[EvaluationResult, EvaluationResult]:
    """The scores of the targets or completions of the tasks (the ceiling), and the scores of the policy's outputs. ``column``: the
    column of ``reward`` that is used as the reward. All tasks are one batch, and each must have a target or a completion."""
    evaluate = Evaluator(
        tasks=tasks,
        renderer=renderer,
        judge=RewardScorer(reward, {column: 1.0}).for_split("heldout", 0),
        ranks=Ranks(),
        seed=1,
        batch=len(tasks),
        demonstrates=has_demonstration(policy.model),
    )
    ceiling = evaluate.ceiling(policy)
    assert ceiling is not None
    return ceiling, evaluate(policy)


def write_index(folder: Path, pipeline: str, parts: Mapping[str, tuple[str, str]]) -> None:
    """Write diffusers' ``model_index.json`` into the folder of a pipeline. ``parts``: the library and the class of each part."""
    index = {"_class_name": pipeline, "_diffusers_version": "0.40.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def halved(module: nn.Module) -> Any:
    """A copy of a module in half precision, for saving."""
    return copy.deepcopy(module).half()
