"""Deliberate bugs in Qwen-Image-2.1: the encoding of prompts and source images, and the conditioning that rows share."""

from mutant import Mutant

_MODEL = "retouch_models/qwen_image_2/model.py"
_TEST = "tests/models/test_families.py"
_SAMPLES = f"{_TEST}::test_sampled_latents_match_the_pipeline"

QWEN_IMAGE_2 = (
    Mutant(
        "text states are taken after the final norm instead of before it",
        _MODEL,
        "register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))",
        "register_forward_hook(lambda _, inputs, output: states.append(output))",
        f"{_SAMPLES}[qwen-image-2-1.0-0-0.0]",
    ),
    Mutant(
        "the tokens of the system turn are kept",
        _MODEL,
        "[row[real][self.prefix :] for",
        "[row[real] for",
        f"{_SAMPLES}[qwen-image-2-1.0-0-0.0]",
    ),
    Mutant(
        "a row of Qwen-Image-2.1 reads the padding of its batch",
        _MODEL,
        'lengths, rows = conditioning.tensors["mask"].sum(1).tolist(), []',
        'lengths, rows = [conditioning.tensors["mask"].shape[1]] * len(x), []',
        "tests/models/test_families.py::test_a_model_passes_the_contract_checks[qwen-image-2-0]",
    ),
    Mutant(
        "source images come after the output in the token sequence",
        _MODEL,
        'torch.cat([inputs["source"], x[row : row + 1]], dim=1)',
        'torch.cat([x[row : row + 1], inputs["source"]], dim=1)',
        f"{_SAMPLES}[qwen-image-2-1.0-2-0.0]",
    ),
    Mutant(
        "transparent pixels become black instead of white",
        _MODEL,
        'ground = new("RGB", resized.size, (255, 255, 255))',
        'ground = new("RGB", resized.size)',
        f"{_TEST}::test_an_image_round_trip_matches_the_autoencoder[qwen-image-2]",
    ),
    Mutant(
        "an empty prompt is encoded without a space", _MODEL, '(prompt or " ")', "prompt", f"{_SAMPLES}[qwen-image-2-4.0-1-0.0]"
    ),
    Mutant(
        "the sampling sigmas that weights come with are ignored",
        _MODEL,
        "given = self.sample_sigmas",
        "given = None",
        f"{_TEST}::test_sample_sigmas_of_the_weights_are_used_if_num_steps_matches",
    ),
)
