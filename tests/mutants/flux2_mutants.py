"""Deliberate bugs in FLUX.2-klein: the encoding of prompts and reference images, the noise and the schedule."""

from mutant import Mutant

_MODEL = "models/flux2/model.py"
_TEST = "tests/models/flux2/test_flux2.py"
_SAMPLES = f"{_TEST}::test_samples_what_the_pipeline_samples"

FLUX2 = (
    Mutant("the layers in another order", _MODEL, "LAYERS = (9, 18, 27)", "LAYERS = (27, 18, 9)", f"{_SAMPLES}[0-1.0]"),
    Mutant("the prompt with thinking on", _MODEL, "THINKING = False", "THINKING = True", f"{_SAMPLES}[0-1.0]"),
    Mutant("prompts padded to the longest", _MODEL, 'PADDING = "max_length"', 'PADDING = "longest"', f"{_SAMPLES}[0-1.0]"),
    Mutant(
        "noise drawn before it is packed",
        _MODEL,
        "shape = (1, 4 * self.channels, *self.grid(size))",
        "return super().noise(size, generators, device)\n        shape = ()",
        f"{_SAMPLES}[0-1.0]",
    ),
    Mutant(
        "a shift that does not know the number of steps",
        _MODEL,
        "compute_empirical_mu(tokens, num_steps)",
        "compute_empirical_mu(tokens, 50)",
        f"{_TEST}::test_sigmas_are_the_pipelines[4-size0]",
    ),
    Mutant(
        "reference images in the place of the output",
        _MODEL,
        "_places(10 * k, *grid, 1)",
        "_places(0, *grid, 1)",
        f"{_SAMPLES}[1-1.0]",
    ),
    Mutant(
        "latents that are not normalised",
        _MODEL,
        "return (tokens - self.vae.bn.running_mean.float()) / self._deviation()",
        "return tokens",
        f"{_SAMPLES}[1-1.0]",
    ),
    Mutant(
        "a reference image cut at its corner",
        _MODEL,
        "(image.width - width) // 2, (image.height - height) // 2",
        "0, 0",
        f"{_TEST}::test_a_reference_image_is_prepared_as_the_pipeline_prepares_it[70-81]",
    ),
)
