"""Diffusers pipelines with tiny random models, as a script loads them."""

from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

import tiny_models


def sd3() -> StableDiffusion3Pipeline:
    """Stable Diffusion 3, for images of 32 x 32 px and prompts of a few words."""
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
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
