"""Any diffusers text-to-image pipeline as a renderer's image model, also for models without a family in ``retouch.models``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL.Image import Image
from torch import nn

from retouch.types import Task

_OURS = ("prompt", "num_inference_steps", "generator", "output_type", "return_dict", "num_images_per_prompt", "latents")


class PipelineTextToImage:
    """Calls a diffusers pipeline with prompts and one generator per prompt (implements ``retouch.renderers.prompts.TextToImage``).

    ``options``: further arguments of the pipeline (``guidance_scale``, ``height``), the same for every prompt. The pipeline
    truncates prompts that are too long. The constructor freezes the pipeline's models and sets them to eval mode. Raises ValueError
    if ``options`` contains an argument that is set here.
    """

    def __init__(self, pipeline: DiffusionPipeline, *, num_steps: int, options: Mapping[str, Any]) -> None:
        taken = [name for name in options if name in _OURS]
        if taken:
            raise ValueError(f"options {taken}: these are given to the pipeline row by row; leave them out")
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = pipeline
        self.num_steps = num_steps
        self.options = dict(options)

    def accepts(self, prompt: str) -> bool:
        return True

    def sample(self, tasks: Sequence[Task], generators: Sequence[torch.Generator]) -> list[Image | None]:
        sampled = self.pipeline(
            prompt=[task.instruction for task in tasks],
            num_inference_steps=self.num_steps,
            generator=list(generators),
            output_type="pt",
            **self.options,
        ).images
        images = self.pipeline.image_processor.numpy_to_pil(self.pipeline.image_processor.pt_to_numpy(sampled.float().nan_to_num()))
        finite = sampled.flatten(1).isfinite().all(dim=1).tolist()
        return [image if usable else None for image, usable in zip(images, finite, strict=True)]
