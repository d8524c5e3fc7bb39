"""Deliberate bugs in FLUX.2-klein: the encoding of prompts and reference images, the noise and the schedule."""

from mutant import Mutant

_MODEL = "retouch_models/flux2/model.py"
_TEST = "tests/models/test_families.py"
_SAMPLES = f"{_TEST}::test_sampled_latents_match_the_pipeline"

FLUX2 = (
    Mutant(
        "the states of the text encoder's layers are concatenated in reverse order",
        _MODEL,
        "LAYERS = (9, 18, 27)",
        "LAYERS = (27, 18, 9)",
        f"{_SAMPLES}[flux2-1.0-0-0.0]",
    ),
    Mutant(
        "the prompt of FLUX.2 is encoded with thinking on",
        _MODEL,
        "THINKING = False",
        "THINKING = True",
        f"{_SAMPLES}[flux2-1.0-0-0.0]",
    ),
    Mutant(
        "prompts are padded to the longest prompt instead of the maximum length",
        _MODEL,
        'PADDING = "max_length"',
        'PADDING = "longest"',
        f"{_SAMPLES}[flux2-1.0-0-0.0]",
    ),
    Mutant(
        "noise is drawn in the unpacked layout",
        _MODEL,
        "shape = (1, 4 * self.channels, *self.grid(size))",
        "return super().noise(size, generators, device)\n        shape = ()",
        f"{_SAMPLES}[flux2-1.0-0-0.0]",
    ),
    Mutant(
        "the timestep shift ignores the number of steps",
        _MODEL,
        "compute_empirical_mu(tokens, num_steps)",
        "compute_empirical_mu(tokens, 50)",
        f"{_TEST}::test_sigmas_of_flux2_match_the_pipeline[4-size0]",
    ),
    Mutant(
        "reference images have the position ids of the output",
        _MODEL,
        "_places(10 * k, *grid, 1)",
        "_places(0, *grid, 1)",
        f"{_SAMPLES}[flux2-4.0-1-1e-05]",
    ),
    Mutant(
        "latents are not normalised",
        _MODEL,
        "return (tokens - self.vae.bn.running_mean.float()) / self._deviation()",
        "return tokens",
        f"{_SAMPLES}[flux2-4.0-1-1e-05]",
    ),
    Mutant(
        "a reference image is cropped at its corner instead of its center",
        _MODEL,
        "(image.width - width) // 2, (image.height - height) // 2",
        "0, 0",
        f"{_TEST}::test_reference_images_of_flux2_are_preprocessed_bitwise_as_in_the_pipeline[70-81]",
    ),
)
