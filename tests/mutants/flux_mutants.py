"""Deliberate bugs in the Flux family: the guidance, image, mask and positions that its transformers receive."""

from mutant import Mutant

_FLUX = "tests/models/test_families.py"

FLUX = (
    Mutant(
        "a guidance-distilled transformer receives guidance 0",
        "retouch_models/flux/model.py",
        "guidance=torch.full((len(x),), self.guidance, device=x.device)",
        "guidance=torch.zeros(len(x), device=x.device)",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[flux-1.0-0-2e-06]",
    ),
    Mutant(
        "rows and columns of the position ids are swapped",
        "retouch_models/flux/model.py",
        "torch.full_like(rows, image), rows, columns]",
        "torch.full_like(rows, image), columns, rows]",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[flux-1.0-0-2e-06]",
    ),
    Mutant(
        "the rows of the pooled text embeddings are reversed",
        "retouch_models/flux/model.py",
        'pooled_projections=tensors["pooled"].to(dtype)',
        'pooled_projections=tensors["pooled"].flip(0).to(dtype)',
        f"{_FLUX}::test_latents_of_undistilled_flux_match_the_pipeline",
    ),
    Mutant(
        "the negative branch of FLUX.1 encodes the instruction",
        "models/pipeline.py",
        "return self.condition(tasks, [self.NEGATIVE] * len(tasks))",
        "return self.condition(tasks, [task.instruction for task in tasks])",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[flux-3.0-0-5e-06]",
    ),
    Mutant(
        "latents are scaled but not shifted",
        "models/pipeline.py",
        "return (x - self.vae.config.shift_factor) * self.vae.config.scaling_factor",
        "return x * self.vae.config.scaling_factor",
        f"{_FLUX}::test_an_image_round_trip_matches_the_autoencoder[flux]",
    ),
    Mutant(
        "the mask is subsampled to the latent size instead of packed",
        "retouch_models/flux/model.py",
        "pack(torch.nn.functional.pixel_unshuffle(mask, self.latent_pixels))",
        "pack(mask[..., :: self.latent_pixels, :: self.latent_pixels].repeat(1, self.latent_pixels**2, 1, 1))",
        f"{_FLUX}::test_packed_mask_of_fill_is_bitwise_equal_to_the_pipeline",
    ),
    Mutant(
        "the source of an inpainting task shows the masked region",
        "retouch_models/flux/model.py",
        "for task in tasks], size) * (1 - mask))",
        "for task in tasks], size))",
        f"{_FLUX}::test_conditioning_of_fill_does_not_depend_on_pixels_under_the_mask",
    ),
    Mutant(
        "the channels of the mask come before those of the source image",
        "retouch_models/flux/model.py",
        "torch.cat([kept, self.latents.pack_mask(mask).to(kept.device)], dim=2)",
        "torch.cat([self.latents.pack_mask(mask).to(kept.device), kept], dim=2)",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[flux-fill-1.0-1-2e-06]",
    ),
    Mutant(
        "the source image has the position ids of the output",
        "retouch_models/flux/model.py",
        "positions(source, image=1)",
        "positions(source)",
        f"{_FLUX}::test_sampled_latents_match_the_pipeline[flux-kontext-1.0-1-2e-06]",
    ),
)
