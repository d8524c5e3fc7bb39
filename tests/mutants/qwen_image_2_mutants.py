"""Deliberate bugs in Qwen-Image-2.1: the encoding of prompts and source images, and the conditioning that rows share."""

from mutant import Mutant

_MODEL = "models/qwen_image_2/model.py"
_TEST = "tests/models/qwen_image_2/test_qwen_image_2.py"
_SAMPLES = f"{_TEST}::test_samples_what_the_pipeline_samples"

QWEN_IMAGE_2 = (
    Mutant(
        "states after the text encoder's last norm",
        _MODEL,
        "register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))",
        "register_forward_hook(lambda _, inputs, output: states.append(output))",
        f"{_SAMPLES}[blue-0-1.0]",
    ),
    Mutant("the system turn is kept", _MODEL, "[row[real][self.prefix :] for", "[row[real] for", f"{_SAMPLES}[blue-0-1.0]"),
    Mutant(
        "a row of Qwen-Image-2.1 reads the padding of its batch",
        _MODEL,
        'lengths, rows = conditioning.tensors["mask"].sum(1).tolist(), []',
        'lengths, rows = [conditioning.tensors["mask"].shape[1]] * len(x), []',
        f"{_TEST}::test_it_keeps_the_contract_of_a_model[0]",
    ),
    Mutant(
        "source images after the output",
        _MODEL,
        'torch.cat([told["source"], x[row : row + 1]], dim=1)',
        'torch.cat([x[row : row + 1], told["source"]], dim=1)',
        f"{_SAMPLES}[blue-1-1.0]",
    ),
    Mutant(
        "images on black for the text encoder",
        _MODEL,
        'ground = new("RGB", image.size, (255, 255, 255))',
        'ground = new("RGB", image.size)',
        f"{_TEST}::test_images_come_back_as_the_autoencoder_gives_them",
    ),
    Mutant("a negative prompt of no token", _MODEL, '(prompt or " ")', "prompt", f"{_SAMPLES}[-0-1.0]"),
    Mutant(
        "the sigmas of distilled weights are forgotten",
        _MODEL,
        "given = self.sample_sigmas",
        "given = None",
        f"{_TEST}::test_the_sigmas_that_weights_come_with_are_taken_where_they_fit",
    ),
)
