"""Diffusers pipelines with tiny random models, as a script would load them."""

from typing import Any

from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
)

import tiny_models


def sd3() -> StableDiffusion3Pipeline:
    """Make a Stable Diffusion 3 for images of 32 x 32 px and prompts of a few words."""
    pipeline = StableDiffusion3Pipeline(
        transformer=tiny_models.sd3_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, num_train_timesteps=1000),
        vae=tiny_models.sd3_vae(),
        text_encoder=tiny_models.clip(16, 1),
        tokenizer=tiny_models.clip_tokenizer(),
        text_encoder_2=tiny_models.clip(24, 2),
        tokenizer_2=tiny_models.clip_tokenizer(),
        text_encoder_3=tiny_models.t5(48, 3),
        tokenizer_3=tiny_models.t5_tokenizer(),
    )
    return _quiet(pipeline)


def qwen_image() -> QwenImagePipeline:
    """Make a Qwen-Image. Its byte tokenizer gives the beginning of the template more tokens than the published tokenizer."""
    tokenizer = tiny_models.qwen_tokenizer()
    return _quiet(QwenImagePipeline(**_qwen_parts(tokenizer), tokenizer=tokenizer))


def qwen_image_edit(kind: type[DiffusionPipeline] = QwenImageEditPipeline) -> DiffusionPipeline:
    """Make a Qwen-Image-Edit, or Edit-Plus if ``kind`` is its pipeline class."""
    tokenizer = tiny_models.qwen_tokenizer()
    processor = tiny_models.ImageProcessorOnly(image_processor=tiny_models.qwen_image_processor(), tokenizer=tokenizer)
    return _quiet(kind(**_qwen_parts(tokenizer), tokenizer=tokenizer, processor=processor))


def _qwen_parts(tokenizer: Any) -> dict[str, Any]:
    return {
        "transformer": tiny_models.qwen_transformer(),
        "vae": tiny_models.qwen_vae(),
        "text_encoder": tiny_models.qwen_text_encoder(tokenizer),
        "scheduler": FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER),
    }


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
