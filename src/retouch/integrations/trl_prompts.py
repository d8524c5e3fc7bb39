"""Prompts for TRL's trainer that give the writer exactly the context that the renderer conditions on.

By default, TRL and transformers use the model's own chat template and images at their native size. The pipeline of an editing model
uses another template and resizes images.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from datasets import Dataset
from packaging.version import Version
from PIL.Image import Resampling
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from retouch.models.common.chat_template import PAD
from retouch.models.common.latents import Area, fit
from retouch.models.qwen_vl.model import QwenWriter
from retouch.types import Task

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


def processor_for(writer: QwenWriter) -> WriterProcessor:
    """Build the trainer's ``processing_class``: it encodes the prompts of ``dataset_of`` to the same ids as ``writer.encode``.

    Also sets the end-of-sequence ids of the writer's model to the writer's stop ids. Raises ValueError if the writer takes no
    images, or if transformers is too old.
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
    block = "".join(
        [
            '{% set seen = namespace(number=0) %}{% for part in messages[0].content %}{% if part.type == "image" %}',
            "{% set seen.number = seen.number + 1 %}",
            f"{{{{ {_literal(writer.image_block)}.replace('{{}}', seen.number | string) }}}}",
            "{% else %}{{ part.text }}{% endif %}{% endfor %}",
        ]
    )
    chat = f"{{{{ {_literal(template.head)} }}}}{block}{{{{ {_literal(template.tail)} }}}}"
    tokenizer = copy.deepcopy(template.tokenizer)
    # TRL pads ids on the left itself, but uses the token types as this tokenizer pads them.
    tokenizer.padding_side = "left"
    return WriterProcessor(template.image_processor, tokenizer, chat_template=chat)


def dataset_of(tasks: Sequence[Task], writer: QwenWriter) -> Dataset:
    """Build the trainer's ``train_dataset``: each task's ``prompt``, its ``images`` resized for the writer, and its index ``task``.

    Images are prepared when a row is read. A reward finds the task with ``task=lambda row: tasks[row["task"]]``.
    """
    return Dataset.from_dict({"task": list(range(len(tasks)))}).with_transform(_Prompts(tasks, writer.area))


class _Prompts:
    """Makes rows from task indices. It holds no model, because ``datasets`` pickles this object to fingerprint the data set."""

    def __init__(self, tasks: Sequence[Task], area: Area) -> None:
        self.tasks = tasks
        self.area = area

    def __call__(self, batch: Mapping[str, list[int]]) -> dict[str, list[Any]]:
        tasks = [self.tasks[number] for number in batch["task"]]
        return {
            "task": batch["task"],
            "prompt": [[{"role": "user", "content": task.instruction}] for task in tasks],
            "images": [[image.resize(fit(image, self.area)[::-1], Resampling.LANCZOS) for image in task.images] for task in tasks],
        }


def _literal(text: str) -> str:
    """Return the text as a Jinja string literal."""
    return json.dumps(text, ensure_ascii=False)
