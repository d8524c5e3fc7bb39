"""The contract checks of rewards, renderers and models: correct ones pass, and every violation is reported."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import tiny_policies as tiny
from retouch.renderers.base import LatentRenderer
from retouch.rewards.function import reward
from retouch.rewards.scorers.pixels import ShareReward
from retouch.types import Column, Sample
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.rewards import PlaygroundReward
from retouch_worlds.testing import check_model, check_renderer, check_reward

# Rewards

UNIT = {"a": Column(0.0, 1.0)}


def samples(count=4):
    return [Sample(task, task.target) for task in tiny.tasks(count)]


def test_the_playground_judge_passes_the_contract_checks():
    tasks = PlaygroundData(seed=0, count=5, complexity=[1, 2, 3]).tasks(in_turn=True)
    check_reward(PlaygroundReward(), [Sample(task, task.target if k % 2 else task.images[0]) for k, task in enumerate(tasks)])


@reward(low=0, high=1)
def redness(images, **kwargs):
    return [image.convert("RGB").resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


@reward(low=0, high=0.1)
def too_red(images):
    return redness(images)


@reward(low=0, high=1)
def of_the_corner(images):
    return [image.getpixel((8, 8))[0] / 255 for image in images]


def test_a_correct_reward_function_passes_the_contract_checks():
    check_reward(redness, samples())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (too_red, "'too_red' gives .* outside its range 0.0 to 0.1"),
        (of_the_corner, "raised an error on an image of one pixel; .*\nIndexError: image index out of range"),
        (PlaygroundReward, r"PlaygroundReward is a class; give an object of it, such as PlaygroundReward\(\)"),
    ],
)
def test_broken_reward_functions_and_classes_fail_with_the_violated_requirement(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_reward(wrong, samples())


def judging(judge, columns=UNIT):
    """A reward that gives one column, from the samples."""

    class Reward:
        def __init__(self):
            self.columns = columns

        def __call__(self, samples):
            return {"a": judge(samples)}

    return Reward()


def brightness(samples):
    return torch.tensor([sample.image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for sample in samples])


def above_the_darkest(samples):
    return brightness(samples) - brightness(samples).min()


@pytest.mark.parametrize(
    ("judge", "columns", "says"),
    [
        (brightness, {**UNIT, "b": Column(0.0, 1.0)}, r"declares the columns \['a', 'b'\] and returns \['a'\]"),
        (brightness, {"a": Column(0.0, 0.1)}, "outside its range 0.0 to 0.1"),
        (lambda samples: brightness(samples)[:-1], UNIT, r"shape \(3,\) for 4 samples"),
        (lambda samples: brightness(samples).round().long(), UNIT, "which cannot represent NaN"),
        (lambda samples: torch.arange(len(samples)) / 10, UNIT, "column 'a' in the order"),
        (lambda samples: brightness(samples) * torch.rand(1), UNIT, "draws from torch's global generator"),
        (above_the_darkest, UNIT, "of a sample in a batch with an image of one pixel"),
        (
            lambda samples: torch.tensor([sample.image.getpixel((8, 8))[0] / 255 for sample in samples]),
            UNIT,
            "raised an error on an image of one pixel",
        ),
        (
            lambda samples: torch.tensor([1 / len(sample.image.getcolors(9999)) for sample in samples]) * torch.inf,
            UNIT,
            "outside its range",
        ),
    ],
)
def test_broken_rewards_fail_with_the_violated_requirement(judge, columns, says):
    with pytest.raises(AssertionError, match=says):
        check_reward(judging(judge, columns), samples())


def test_rewards_with_missing_scores_pass_the_contract_checks():
    check_reward(judging(lambda samples: brightness(samples).where(brightness(samples) > 0.49, torch.nan)), samples())
    check_reward(ShareReward(), samples())


# Renderers


def acted():
    policy, batch = tiny.policy("sd3"), tiny.batch()
    return policy, [batch.tasks[k] for k in batch.group], policy.rollout(batch)


def brighter(images):
    return [None if image is None else image.point(lambda level: min(255, level + len(images))) for image in images]


def test_broken_renderers_fail_with_the_violated_requirement():
    policy, tasks, trajectory = acted()
    good = LatentRenderer(policy.model)

    def spoils(tasks, trajectory):
        images = good(tasks, trajectory)
        trajectory.outputs.add_(1e-3)
        return images

    broken = {
        "3 images for 4 rows": lambda tasks, trajectory: good(tasks, trajectory)[:3],
        "row 0 rendered alone": lambda tasks, trajectory: brighter(good(tasks, trajectory)),
        "mode L, not RGB": lambda tasks, trajectory: [image.convert("L") for image in good(tasks, trajectory)],
        "is not finite was rendered": lambda tasks, trajectory: policy.model.decode(
            trajectory.outputs.nan_to_num(), trajectory.conditioning
        ),
        "changed the trajectory's outputs": spoils,
        "rendered again": lambda tasks, trajectory: [Image.effect_noise((8, 8), 60).convert("RGB") for _ in range(len(trajectory))],
    }
    check_renderer(good, tasks, trajectory)
    for says, renderer in broken.items():
        with pytest.raises(AssertionError, match=says):
            check_renderer(renderer, tasks, replace(trajectory, outputs=trajectory.outputs.clone()))


# Models

PARTS = ("module", "encode", "encode_negative", "combine", "initial_noise", "sigmas", "velocity", "encode_images", "decode")


def changed(model, **parts):
    """The model with some of its methods replaced."""
    return SimpleNamespace(**{name: getattr(model, name) for name in PARTS} | parts)


def masked(conditioning, mask):
    return replace(conditioning, tensors={**conditioning.tensors, "mask": mask})


@pytest.fixture(scope="module")
def model():
    return tiny.edit_model()


def test_broken_models_fail_with_the_violated_requirement(model):
    velocity, tasks = model.velocity, tiny.tasks(3)
    swapped = changed(
        model,
        velocity=lambda module, x, sigma, given: velocity(module, x, sigma, masked(given, given.tensors["mask"].flip(0))),
    )
    blind = changed(
        model,
        velocity=lambda module, x, sigma, given: velocity(module, x, sigma, masked(given, torch.ones_like(given.tensors["mask"]))),
    )
    broken = [
        (swapped, "velocity of "),
        (blind, "velocity of tasks encoded one by one|velocity of row . alone|places of padding"),
        (
            changed(model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma.mean().expand_as(sigma), given)),
            "velocity of ",
        ),
        (changed(model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma, given).double()), "in torch.float64"),
        (changed(model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma, given) / 0), "not finite"),
        (
            changed(model, initial_noise=lambda given, keys: model.initial_noise(given, keys[:1] * len(keys))),
            "other rows' generators",
        ),
        (changed(model, initial_noise=lambda given, keys: 2 * model.initial_noise(given, keys)), "variance"),
        (changed(model, initial_noise=lambda given, keys: torch.randn(len(keys), 4, 64)), "draws from torch's global generator"),
        (changed(model, sigmas=lambda steps, given: model.sigmas(steps, given)[:-1]), r"\(4,\) sigmas for 4 steps, not 5"),
        (changed(model, sigmas=lambda steps, given: model.sigmas(steps, given).flip(0)), "do not decrease from about 1 to 0"),
        (changed(model, combine=lambda positive, negative, scale: positive + scale * (positive - negative)), "guidance at scale 1"),
        (changed(model, encode_negative=lambda tasks: model.encode_negative(tasks[:1])), "has 1 rows for 3 tasks"),
        (changed(model, decode=lambda x, given: model.decode(x[:1], given)), "1 images for 3 rows"),
        (changed(model, encode_images=lambda images: model.encode_images(images)[:, :2]), "encode_images gives"),
    ]
    check_model(model, tasks)
    for each, says in broken:
        with pytest.raises(AssertionError, match=says):
            check_model(each, tasks)


def test_fault_12_a_velocity_that_ignores_its_arguments_fails_the_check(model):
    velocity, tasks = model.velocity, tiny.tasks(3)
    first = model.encode([tasks[0]])
    broken = [
        (lambda module, x, sigma, given: velocity(model.module, x, sigma, given), "ignores `module`"),
        (lambda module, x, sigma, given: velocity(module, x, 1000 * sigma, given), "scaled twice"),
        (lambda module, x, sigma, given: velocity(module, x, torch.full_like(sigma, 0.5), given), "does not change with sigma"),
        (
            lambda module, x, sigma, given: velocity(module, x, sigma, first.take(torch.zeros(len(x), dtype=torch.long))),
            "does not change with the instruction",
        ),
    ]
    for each, says in broken:
        with pytest.raises(AssertionError, match=says):
            check_model(changed(model, velocity=each), tasks)


def test_fault_12_a_model_that_ignores_only_the_instruction_fails_the_check():
    """Its velocities of different tasks still differ, because their source images do."""
    trained = PlaygroundModel().build(device=torch.device("cpu"))
    tasks = list(PlaygroundData(count=3, complexity=[1]).tasks())
    encode = trained.encode
    ignoring = changed(trained, encode=lambda given: encode([replace(task, instruction="make it red") for task in given]))
    with pytest.raises(AssertionError, match="does not change with the instruction alone"):
        check_model(ignoring, tasks)
    same = [replace(task, instruction="make it red") for task in tasks]
    with pytest.raises(AssertionError, match="an instruction of its own"):
        check_model(trained, same)


def test_fault_12_with_trained_weights_the_sign_of_the_velocity_is_checked():
    trained = PlaygroundModel().build(device=torch.device("cpu"))
    tasks = list(PlaygroundData(count=3, complexity=[1]).tasks())
    check_model(trained, tasks, trained=True)
    velocity, encode = trained.velocity, trained.encode_images
    broken = [
        changed(trained, velocity=lambda module, x, sigma, given: -velocity(module, x, sigma, given)),
        changed(trained, velocity=lambda module, x, sigma, given: velocity(module, x, 1 - sigma, given)),
        changed(trained, encode_images=lambda images: 20 * encode(images)),
    ]
    for each in broken:
        check_model(each, tasks)
        with pytest.raises(AssertionError, match="the velocity explains"):
            check_model(each, tasks, trained=True)
    with pytest.raises(AssertionError, match="every task needs a target"):
        check_model(trained, [replace(task, target=None) for task in tasks], trained=True)
