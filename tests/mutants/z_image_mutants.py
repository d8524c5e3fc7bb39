"""Deliberate bugs in Z-Image: the time, the sign of the velocity, the encoding of prompts, and their padding."""

from mutant import Mutant

_TEST = "tests/models/test_families.py"
_WALK = f"{_TEST}::test_sampled_latents_match_the_pipeline"

Z_IMAGE = (
    Mutant(
        "the transformer receives sigma instead of 1 - sigma as its time",
        "retouch_models/z_image/model.py",
        "(1000 - sigma * 1000) / 1000",
        "sigma",
        f"{_WALK}[z-image-1.0-0-5e-06]",
    ),
    Mutant(
        "the velocity has the wrong sign",
        "retouch_models/z_image/model.py",
        "return -pack(",
        "return pack(",
        f"{_WALK}[z-image-1.0-0-5e-06]",
    ),
    Mutant(
        "the negative branch of Z-Image encodes the instruction",
        "models/pipeline.py",
        "return self.condition(tasks, [self.NEGATIVE] * len(tasks))",
        "return self.condition(tasks, [task.instruction for task in tasks])",
        f"{_WALK}[z-image-4.0-0-5e-06]",
    ),
    Mutant(
        "a row of Z-Image reads the padding of its batch",
        "retouch_models/z_image/model.py",
        "[row[:length] for row",
        "[row for row",
        "tests/models/test_families.py::test_a_model_passes_the_contract_checks[z-image-0]",
    ),
    Mutant(
        "the last hidden states are used instead of the next-to-last",
        "retouch_models/z_image/model.py",
        "LAYERS = (-2,)",
        "LAYERS = (-1,)",
        f"{_TEST}::test_latents_of_z_image_with_a_shift_by_size_match_the_pipeline",
    ),
    Mutant(
        "the prompt of Z-Image is encoded with thinking off",
        "retouch_models/z_image/model.py",
        "THINKING = True",
        "THINKING = False",
        f"{_TEST}::test_latents_of_z_image_with_a_shift_by_size_match_the_pipeline",
    ),
    Mutant(
        "padding of the text embeddings is not zero",
        "retouch_models/z_image/model.py",
        "torch.where(mask[..., None], states, 0)",
        "states",
        f"{_TEST}::test_the_embeddings_of_padding_of_z_image_are_zero",
    ),
    Mutant(
        "the last sigma is 0.001 instead of 1 / num_steps",
        "retouch_models/z_image/model.py",
        "return list(torch.linspace(1.0, 1 / num_steps, num_steps).tolist())",
        "return list(torch.linspace(1.0, 0.001, num_steps).tolist())",
        f"{_WALK}[z-image-1.0-0-5e-06]",
    ),
)
