"""Deliberate bugs in the Flux family: the guidance, image, mask and positions that its transformers receive."""

from mutant import Mutant

_FLUX = "tests/models/flux/test_flux.py"

FLUX = (
    Mutant(
        "a distilled transformer is told of no guidance",
        "models/flux/model.py",
        "guidance=torch.full((len(x),), self.guidance, device=x.device)",
        "guidance=torch.zeros(len(x), device=x.device)",
        f"{_FLUX}::test_walks_with_the_pipeline[True]",
    ),
    Mutant(
        "rows and columns change places",
        "models/flux/model.py",
        "torch.full_like(rows, image), rows, columns]",
        "torch.full_like(rows, image), columns, rows]",
        f"{_FLUX}::test_walks_with_the_pipeline[True]",
    ),
    Mutant(
        "pooled of the wrong text",
        "models/flux/model.py",
        'pooled_projections=tensors["pooled"].to(dtype)',
        'pooled_projections=tensors["pooled"].flip(0).to(dtype)',
        f"{_FLUX}::test_walks_with_the_pipeline[False]",
    ),
    Mutant(
        "the negative has the words too",
        "models/common/pipeline_model.py",
        "return self.condition(tasks, [self.NEGATIVE] * len(tasks))",
        "return self.condition(tasks, [task.instruction for task in tasks])",
        f"{_FLUX}::test_true_guidance_walks_with_the_pipeline",
    ),
    Mutant(
        "latents scaled and not shifted",
        "models/common/latents.py",
        "return (x - self.vae.config.shift_factor) * self.vae.config.scaling_factor",
        "return x * self.vae.config.scaling_factor",
        f"{_FLUX}::test_pictures_come_back_from_their_latents",
    ),
    Mutant(
        "the mask of an inpainting is shrunk to the latents",
        "models/flux/fill.py",
        "pack(torch.nn.functional.pixel_unshuffle(mask, self.latent_pixels))",
        "pack(mask[..., :: self.latent_pixels, :: self.latent_pixels].repeat(1, self.latent_pixels**2, 1, 1))",
        f"{_FLUX}::test_the_mask_is_packed_to_the_pipelines_bits",
    ),
    Mutant(
        "an inpainting sees what it is to make",
        "models/flux/fill.py",
        "for task in tasks], size) * (1 - mask))",
        "for task in tasks], size))",
        f"{_FLUX}::test_fill_does_not_see_what_it_is_to_make",
    ),
    Mutant(
        "the mask before the picture",
        "models/flux/fill.py",
        "torch.cat([kept, self.latents.pack_mask(mask).to(kept.device)], dim=2)",
        "torch.cat([self.latents.pack_mask(mask).to(kept.device), kept], dim=2)",
        f"{_FLUX}::test_fill_walks_with_the_pipeline",
    ),
    Mutant(
        "the source lies where the output does",
        "models/flux/kontext.py",
        "positions(source, image=1)",
        "positions(source)",
        f"{_FLUX}::test_kontext_walks_with_the_pipeline",
    ),
)
