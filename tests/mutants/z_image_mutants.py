"""Deliberate bugs in Z-Image: the time, the sign of the velocity, the encoding of prompts, and their padding."""

from mutant import Mutant

_TEST = "tests/models/z_image/test_z_image.py"
_WALK = f"{_TEST}::test_walks_with_the_pipeline"

Z_IMAGE = (
    Mutant(
        "time runs the other way",
        "models/z_image/model.py",
        "(1000 - sigma * 1000) / 1000",
        "sigma",
        f"{_WALK}[0.0-turbo]",
    ),
    Mutant(
        "a velocity towards the noise",
        "models/z_image/model.py",
        "return -pack(",
        "return pack(",
        f"{_WALK}[0.0-turbo]",
    ),
    Mutant(
        "the negative of Z-Image has the words too",
        "models/common/pipeline_model.py",
        "return self.condition(tasks, [self.NEGATIVE] * len(tasks))",
        "return self.condition(tasks, [task.instruction for task in tasks])",
        f"{_WALK}[3.0-turbo]",
    ),
    Mutant(
        "a row reads the padding of its batch",
        "models/z_image/model.py",
        "[row[:length] for row",
        "[row for row",
        f"{_TEST}::test_it_is_a_denoising_model_and_a_row_does_not_see_its_batch",
    ),
    Mutant(
        "the last hidden states",
        "models/z_image/model.py",
        "LAYERS = (-2,)",
        "LAYERS = (-1,)",
        f"{_WALK}[0.0-by size]",
    ),
    Mutant(
        "a thought that is thought already",
        "models/z_image/model.py",
        "THINKING = True",
        "THINKING = False",
        f"{_WALK}[0.0-by size]",
    ),
    Mutant(
        "padding that is not zero",
        "models/z_image/model.py",
        "torch.where(mask[..., None], states, 0)",
        "states",
        f"{_TEST}::test_it_is_a_denoising_model_and_a_row_does_not_see_its_batch",
    ),
    Mutant(
        "steps in equal parts of the scheduler's own",
        "models/z_image/model.py",
        "return list(torch.linspace(1.0, 1 / num_steps, num_steps).tolist())",
        "return list(torch.linspace(1.0, 0.001, num_steps).tolist())",
        f"{_WALK}[0.0-turbo]",
    ),
)
