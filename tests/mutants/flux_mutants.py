"""Deliberate bugs in the Flux family: the guidance, image, mask and positions that its transformers receive."""

from mutant import Mutant

_FLUX = "tests/models/flux/test_flux.py"

FLUX = (
    Mutant(
        "a guidance-distilled transformer receives guidance 0",
        "models/flux/model.py",
        "guidance=torch.full((len(x),), self.guidance, device=x.device)",
        "guidance=torch.zeros(len(x), device=x.device)",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[True]",
    ),
    Mutant(
        "rows and columns of the position ids are swapped",
        "models/flux/model.py",
        "torch.full_like(rows, image), rows, columns]",
        "torch.full_like(rows, image), columns, rows]",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[True]",
    ),
    Mutant(
        "the rows of the pooled text embeddings are reversed",
        "models/flux/model.py",
        'pooled_projections=tensors["pooled"].to(dtype)',
        'pooled_projections=tensors["pooled"].flip(0).to(dtype)',
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[False]",
    ),
    Mutant(
        "the negative branch of FLUX.1 encodes the instruction",
        "models/pipeline.py",
        "return self.condition(tasks, [self.NEGATIVE] * len(tasks))",
        "return self.condition(tasks, [task.instruction for task in tasks])",
        f"{_FLUX}::test_sampled_latents_with_true_cfg_match_the_pipeline",
    ),
    Mutant(
        "latents are scaled but not shifted",
        "models/pipeline.py",
        "return (x - self.vae.config.shift_factor) * self.vae.config.scaling_factor",
        "return x * self.vae.config.scaling_factor",
        f"{_FLUX}::test_encoded_images_match_the_packed_latents_of_the_autoencoder",
    ),
    Mutant(
        "the mask is subsampled to the latent size instead of packed",
        "models/flux/model.py",
        "pack(torch.nn.functional.pixel_unshuffle(mask, self.latent_pixels))",
        "pack(mask[..., :: self.latent_pixels, :: self.latent_pixels].repeat(1, self.latent_pixels**2, 1, 1))",
        f"{_FLUX}::test_packed_mask_is_bitwise_equal_to_the_pipeline",
    ),
    Mutant(
        "the source of an inpainting task shows the masked region",
        "models/flux/model.py",
        "for task in tasks], size) * (1 - mask))",
        "for task in tasks], size))",
        f"{_FLUX}::test_fill_conditioning_does_not_depend_on_pixels_under_the_mask",
    ),
    Mutant(
        "the channels of the mask come before those of the source image",
        "models/flux/model.py",
        "torch.cat([kept, self.latents.pack_mask(mask).to(kept.device)], dim=2)",
        "torch.cat([self.latents.pack_mask(mask).to(kept.device), kept], dim=2)",
        f"{_FLUX}::test_fill_latents_match_the_pipeline",
    ),
    Mutant(
        "the source image has the position ids of the output",
        "models/flux/model.py",
        "positions(source, image=1)",
        "positions(source)",
        f"{_FLUX}::test_kontext_latents_match_the_pipeline",
    ),
)
