"""A reward function for TRL's GRPOTrainer: a renderer of Retouch renders the completions, and a reward scores the images.

TRL runs the policy, its sampling and its updates. It calls a reward function with lists, one entry per row: the sampled
``completion_ids``, the ``completions`` as text, and the columns of the data set. The rows of a group belong to one task.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from datasets import Dataset
from packaging.version import Version
from PIL.Image import Resampling
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from retouch.distributed.ranks import Ranks
from retouch.models.pipeline import Area, fit
from retouch.protocols import AutoregressiveModel, Renderer, Reward
from retouch.renderers.base import Completions
from retouch.rewards.combination import Combine
from retouch.rewards.judging import RewardScorer
from retouch.run.step import TooManyMissing
from retouch.types import Completion, Sample, Task

NOT_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


class RetouchReward:
    """Renders and scores completions. Returns a float for each, or None if it could not be scored (TRL ignores such a row).

    ``writer``: wraps the model that TRL trains; it knows which ids end a completion and how to decode ids. Images are rendered from
    the ids. TRL's text is not used, because encoding it again may give other ids. ``combine``: how the columns are combined into
    the reward. ``task``: makes the task of a row from the row's columns. The rows of a group must give tasks with the same
    ``id``, which also keys the noise of their images, together with ``seed`` and the optimizer step. ``max_missing``: the largest
    allowed fraction of missing scores over all ranks; above it, TooManyMissing stops the training on all ranks.

    A completion that cannot be rendered is the policy's fault and gets the worst value of every column. The means of the columns
    and the fractions of missing scores and faults are logged as metrics of the trainer. Raises the ValueErrors of ``RewardScorer``
    and ``task``."""

    __name__ = "retouch"  # the name in TRL's metrics

    def __init__(
        self,
        writer: AutoregressiveModel,
        renderer: Renderer,
        reward: Reward,
        *,
        combine: Combine,
        task: Callable[[Mapping[str, Any]], Task],
        seed: int = 0,
        max_missing: float = 0.2,
    ) -> None:
        self.writer = writer
        self.renderer = renderer
        self.judge = RewardScorer(reward, combine)
        self.task = task
        self.seed = seed
        self.max_missing = max_missing

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        """Return the rewards of TRL's rows, in order."""
        state, log_metric = columns.get("trainer_state"), columns.get("log_metric")
        step = 0 if state is None else int(state.global_step)
        ranks = Ranks()
        if dist.is_initialized():  # by the trainer
            process = PartialState()
            ranks = Ranks(rank=process.process_index, world=process.num_processes, device=process.device)
        given = {name: values for name, values in columns.items() if name not in NOT_COLUMNS}
        tasks, known = list[Task](), dict[str, Task]()
        outputs = list[Completion]()
        for row, ids in enumerate(completion_ids):
            task = self.task({name: values[row] for name, values in given.items()})
            tasks.append(known.setdefault(task.id, task))  # one object, so that its images and prompt are prepared once
            ended = not ids or ids[-1] in self.writer.stop
            tokens = tuple(ids[:-1] if ended else ids)
            # Equal on all ranks: TRL spreads a group's rows over ranks and does not number groups.
            group = int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:7], "big")
            key = (self.seed, step, group, ranks.rank * len(completion_ids) + row)
            outputs.append(Completion(tokens, self.writer.decode(tokens), not ended, key))
        images = self.renderer(tasks, Completions(tuple(outputs)))
        judged = self.judge([Sample(task, image, out.text) for task, image, out in zip(tasks, images, outputs, strict=True)])
        missing = judged.rewards.isnan()
        if log_metric is not None:
            for name, column in judged.scores.items():
                if not column.isnan().all():
                    log_metric(f"reward/{name}", column.nanmean().item())
            log_metric("reward/missing_fraction", missing.float().mean().item())
            log_metric("reward/fault_fraction", judged.faults / len(missing))
        lost, rows = ranks.sum(torch.tensor([float(missing.sum()), float(len(missing))])).tolist()
        if lost > self.max_missing * rows:
            raise TooManyMissing(
                f"{lost / rows:.0%} of the samples have no score, but max_missing allows only {self.max_missing:.0%}: the judge is "
                f"failing. Resume from the last checkpoint when the judge works{judged.last_fault}"
            )
        return [None if reward != reward else reward for reward in judged.rewards.tolist()]


PAD = "<|image_pad|>"
"""Qwen's token of a part of an image."""
_TRANSFORMERS = Version("5.23")  # the first release whose processors mark image tokens for TRL


class WriterProcessor(ProcessorMixin):
    """Combines Qwen's tokenizer and image processor. It has no video processor, which would need torchvision."""

    return_mm_token_type_ids = True

    def __init__(
        self, image_processor: Any = None, tokenizer: PreTrainedTokenizerBase | None = None, chat_template: str | None = None
    ) -> None:
        assert tokenizer is not None
        self.image_token = PAD
        self.image_token_id = tokenizer.convert_tokens_to_ids(PAD)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **kwargs: Any) -> str:
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return self.image_token * (patches // self.image_processor.merge_size**2)

    @property
    def model_input_names(self) -> list[str]:
        return [*super().model_input_names, "mm_token_type_ids"]


def processor_for(writer: Any) -> WriterProcessor:
    """Build the trainer's ``processing_class``: it encodes the prompts of ``dataset_of`` to the same ids as ``writer.encode``.

    ``writer``: a ``QwenWriter`` (``retouch_models.qwen_vl``). Also sets the end-of-sequence ids of its model to its stop ids.
    Raises ValueError if the writer takes no images, or if transformers is too old.
    """
    if Version(transformers.__version__) < _TRANSFORMERS:
        raise ValueError(
            f"images in TRL need transformers {_TRANSFORMERS}, and this is {transformers.__version__}: pip install 'retouch[trl]'"
        )
    template = writer.template
    if template.image_processor is None:
        raise ValueError(f"{type(writer.module).__name__} takes no images; give TRL its tokenizer as processing_class")
    generation_config: Any = writer.module.generation_config
    generation_config.eos_token_id = list(writer.stop)
    literal = partial(json.dumps, ensure_ascii=False)  # a Jinja string literal
    block = "".join(
        [
            '{% set seen = namespace(number=0) %}{% for part in messages[0].content %}{% if part.type == "image" %}',
            "{% set seen.number = seen.number + 1 %}",
            f"{{{{ {literal(writer.image_block)}.replace('{{}}', seen.number | string) }}}}",
            "{% else %}{{ part.text }}{% endif %}{% endfor %}",
        ]
    )
    chat = f"{{{{ {literal(template.head)} }}}}{block}{{{{ {literal(template.tail)} }}}}"
    tokenizer = copy.deepcopy(template.tokenizer)
    # TRL pads ids on the left itself, but uses the token types as this tokenizer pads them.
    tokenizer.padding_side = "left"
    return WriterProcessor(template.image_processor, tokenizer, chat_template=chat)


def dataset_of(tasks: Sequence[Task], writer: Any) -> Dataset:
    """Build the trainer's ``train_dataset``: each task's ``prompt``, its ``images`` resized for the writer, and its index ``task``.

    Images are prepared when a row is read. A reward finds the task with ``task=lambda row: tasks[row["task"]]``.
    """
    return Dataset.from_dict({"task": list(range(len(tasks)))}).with_transform(_Prompts(tasks, writer.area))


@dataclass(frozen=True)
class _Prompts:
    """Makes rows from task indices. It holds no model, because ``datasets`` pickles this object to fingerprint the data set."""

    tasks: Sequence[Task]
    area: Area

    def __call__(self, batch: Mapping[str, list[int]]) -> dict[str, list[Any]]:
        tasks = [self.tasks[number] for number in batch["task"]]
        return {
            "task": batch["task"],
            "prompt": [[{"role": "user", "content": task.instruction}] for task in tasks],
            "images": [[image.resize(fit(image, self.area)[::-1], Resampling.LANCZOS) for image in task.images] for task in tasks],
        }
