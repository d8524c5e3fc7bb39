"""A reward gets copies of its own, changes no setting of the process, ends no run without a word, and may score near 1e6."""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

import retouch
import tiny_bridge
import tiny_pipelines
from live_server import host, live, remote
from retouch.objectives.reward_gradient import DRaFT
from retouch.rewards.combination import weighted_scores
from retouch.rewards.function import FunctionReward
from retouch.rewards.judging import CalibratedScores, CompositeReward, RewardScorer
from retouch.rewards.loading import LoadedReward
from retouch.rewards.pixels import ShareReward
from retouch.rewards.scoring import call_reward, scores_of
from retouch.types import Column, Sample, Scores, Task
from retouch_view.votes.commands import Calibration
from small_trainer import SMALL


def made_samples():
    """Two samples of one task with everything that a task may have; a column holds a list, an array, a tensor and an image."""
    images = [Image.new("RGB", (8, 8), (10 * number, 90, 30)) for number in range(9)]
    column = {"boxes": [[1, 2], {"label": ["cat"]}], "array": np.ones(3), "tensor": torch.ones(3), "image": images[7]}
    mask = images[2].convert("L")
    task = Task("a", "b", (images[0], images[1]), mask, *images[3:5], "text", {"tag": "x"}, column, images[5], images[6])
    return [Sample(task, images[8], "written"), Sample(task, images[8].copy(), "written")]


def content(value):
    """Everything that can be changed in samples, as text."""
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes(), sorted(value.info)
    if isinstance(value, Sample | Task):
        return [content(getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        return {name: content(inner) for name, inner in value.items()}
    return [content(inner) for inner in value] if isinstance(value, list | tuple) else repr(value)


def spoil(value):
    """Change whatever can be changed."""
    if isinstance(value, Image.Image):
        with suppress(ValueError, AttributeError):  # it is closed already
            ImageDraw.Draw(value).rectangle((0, 0, *value.size), fill=255)
            value.load()[0, 0] = 7 if value.mode == "L" else (1, 2, 3)
            value.info["painted"] = True
            value.thumbnail((2, 2))
            value.putalpha(9)
            value.close()
    elif isinstance(value, Sample | Task):
        for name in value.__dataclass_fields__:
            spoil(getattr(value, name))
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            spoil(inner)
        with suppress(AttributeError):  # a tuple
            value.clear()
    elif isinstance(value, np.ndarray | torch.Tensor):
        value[...] = 5


def scored(samples):
    return [float(hash(str(content(sample))) % 1000) for sample in samples]


class Spoils:
    """Scores the content of the samples, and then spoils them. It also keeps them, and spoils them again in the next call."""

    columns: ClassVar = {"score": Column(0.0, 1000.0)}
    reads_completions = True

    def __init__(self):
        self.kept: list[Any] = []

    def __call__(self, samples):
        found = scored(samples)
        spoil([self.kept, list(samples)])
        self.kept.append(list(samples))
        return found


class SpoilsLater(Spoils):
    def submit(self, samples):
        future: Future[Scores] = Future()
        future.set_result({"score": torch.tensor(self(samples))})
        return future


class Looks(Spoils):
    def __call__(self, samples):
        time.sleep(0.05)
        return scored(samples)


class SpoilsTensors(Spoils):
    def score_tensors(self, images, tasks):
        spoil(list(tasks))
        return images.mul_(0.5).mean((1, 2, 3))


def submitted(reward, samples):
    with closing(RewardScorer(reward, dict.fromkeys(reward.columns, 1.0))) as judge:
        futures = [judge.submit(samples) for _ in range(2)]
        first, second = (future.result().scores for future in futures)
    assert {name: column.tolist() for name, column in first.items()} == {name: column.tolist() for name, column in second.items()}
    return first


def spoils_arguments(**columns):
    found = [float(np.asarray(image).sum() % 1000) for image in columns["images"]]
    spoil(dict(columns))
    return found


def spoils_and_fails(**columns):
    spoil(dict(columns))
    raise KeyError("boxes")


def failed(samples):
    with pytest.raises(ValueError, match="KeyError: 'boxes'"):
        call_reward(FunctionReward.of(spoils_and_fails), samples)


def next_to_others(samples):
    alone = scores_of(Looks(), samples)["score"].tolist()
    together = submitted(CompositeReward({"before": Spoils(), "looks": Looks(), "later": SpoilsLater()}), samples)
    assert [column.tolist() for column in together.values()] == [alone] * 3


def of_tensors(reward, samples):
    images = torch.ones(2, 3, 4, 4, requires_grad=True) * 0.5
    total = weighted_scores(
        {"own": reward, "red": ShareReward()}, {"own/score": 1.0, "red/share": 1.0}, images, [s.task for s in samples]
    )
    assert total.tolist() == pytest.approx([0.25 + 1 / 3] * 2, abs=1e-3)


WAYS: dict[str, Callable[[list[Sample]], Any]] = {
    "scores_of": lambda samples: scores_of(Spoils(), samples),
    "score": lambda samples: retouch.score(
        Spoils(), samples[0].image, source=samples[0].task.images, meta=dict(samples[0].task.meta)
    ),
    "load": lambda samples: LoadedReward(Spoils())([samples[0].image], sources=[samples[0].task.images[0]]),
    "a scorer on the caller's thread": lambda samples: RewardScorer(Spoils(), {"score": 1.0})(samples),
    "in the background": lambda samples: submitted(Spoils(), samples),
    "a reward that answers later": lambda samples: submitted(SpoilsLater(), samples),
    "several": lambda samples: submitted(CompositeReward({"one": Spoils(), "two": Looks(), "three": SpoilsLater()}), samples),
    "several on the caller's thread": lambda samples: CompositeReward({"one": Spoils(), "two": Looks()})(samples),
    "calibrated": lambda samples: scores_of(
        CalibratedScores(Spoils(), "score", Calibration("score", *[(0.0, 1.0)] * 5, votes=9, tasks=9)), samples
    ),
    "a function": lambda samples: scores_of(FunctionReward.of(spoils_arguments), samples),
    "an error": failed,
    "next to rewards that spoil": next_to_others,
    "gradients of several": lambda samples: of_tensors(SpoilsTensors(), samples),
}


@pytest.mark.parametrize("way", WAYS)
def test_point_1_1_nothing_that_a_reward_changes_reaches_the_samples_of_the_run(way):
    samples = made_samples()
    before = content(samples)
    WAYS[way](samples)
    assert content(samples) == before


def test_point_1_1_rewards_of_a_server_get_copies_of_their_own():
    class Last(Looks):
        columns: ClassVar = {"last": Column(0.0, 1000.0)}

    samples = [Sample(Task("a", "b", (Image.new("RGB", (8, 8), "red"),)), Image.new("RGB", (8, 8), "blue"))]
    with live(host(Spoils(), "first"), host(Last(), "second")) as server, closing(remote([server.url])) as client:
        found = client(samples)
    assert found["score"].tolist() == found["last"].tolist()


def test_point_1_1_trl_and_draft_give_copies_too():
    class Paints(tiny_bridge.Brightness):
        def __call__(self, samples):
            found = super().__call__(samples)
            spoil(list(samples))
            return found

    task = made_samples()[0].task
    before = content(task)
    function, _ = tiny_bridge.bridge(task=lambda row: task)
    function.judge = RewardScorer(Paints(), {"light": 1.0})
    assert tiny_bridge.trl_call(function, [[4, 2], [5, 2]]) == [4.0, 5.0]
    objective = DRaFT(reward=ShareReward())
    objective._scorer = SpoilsTensors()
    batch = retouch.types.Batch(0, 0, (task,), (0,), (0, 0), (0, 1))

    class Chain:
        module, rollout, sample, microbatches, evaluate = None, len, len, len, len
        row_slices = staticmethod(lambda made: [slice(0, 2)])
        images = staticmethod(lambda made, rows, predicted: torch.ones(2, 3, 4, 4, requires_grad=True) * 1.0)

    minibatch = retouch.types.Minibatch(batch, None, torch.ones(2, 1), torch.ones(2, 1))
    assert [loss.value.item() for loss in objective.losses(Chain(), minibatch)] == [-1.0]
    assert content(task) == before


def test_point_1_1_training_leaves_the_rows_of_the_caller_and_the_sources_of_later_steps_as_they_are(tmp_path):
    seen: dict[str, set[bytes]] = {}

    @retouch.reward(low=0, high=1)
    def paints(images, sources, tasks, boxes, **rest):
        for task, source in zip(tasks, sources, strict=True):
            seen.setdefault(task.id, set()).add(source.tobytes())  # read and painted in turn: each sample has its own source
            spoil(source)
        spoil([images, boxes, rest])
        return [0.5 + index / 100 for index in range(len(sources))]

    rows = [{"prompt": f"red {n}", "image": Image.new("RGB", (24, 24), (n, 2, 3)), "boxes": [[n], {"a": [n]}]} for n in range(6)]
    before = content(rows)
    model = retouch.models.PlaygroundModel()
    keys = {**SMALL, "peft_config": None, "size": None, "eval": {"tasks": 2}, "output_dir": tmp_path, "run_name": "r"}
    retouch.Trainer(model, paints, rows, **keys).train()
    assert content(rows) == before
    assert {len(sources) for sources in seen.values()} == {1}


SETTINGS: dict[str, tuple[Callable[[], object], str]] = {
    "chdir": (lambda: os.chdir("/"), "the current folder from .* to /"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype from torch.float32 to torch.float64"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "torch's deterministic debug mode from 0 to 2"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "torch's float32 matmul precision from highest to medium"),
    "benchmark": (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cudnn.benchmark from False to True"),
    "of the thread": (lambda: (torch.set_default_device("meta"), torch.set_grad_enabled(False)), ""),
}


def settings():
    device = torch.get_default_device(), torch.is_grad_enabled()
    return [os.getcwd(), torch.get_default_dtype(), torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, device]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("way", [scores_of, submitted])
def test_point_1_8_a_reward_that_changes_a_setting_of_the_process_is_named_and_the_setting_is_set_back(way, setting):
    change, says = SETTINGS[setting]

    def careless(images, **rest):
        change()
        return [0.5] * len(images)

    before = settings()
    if says:
        with pytest.raises(ValueError, match=f"^reward function careless changed {says}"):
            way(FunctionReward.of(careless), made_samples())
    else:
        assert way(FunctionReward.of(careless), made_samples())["careless"].tolist() == [0.5, 0.5]
    assert settings() == before


@pytest.mark.parametrize("overlap", [True, False])
def test_point_1_8_only_rewards_that_may_have_changed_a_setting_are_named(overlap):
    began, changed = threading.Event(), threading.Event()

    def careless(images, **rest):
        assert not overlap or began.wait(30)
        os.chdir("/")
        return [0.5] * len(images)

    def innocent(images, **rest):
        began.set()
        assert not overlap or changed.wait(30)
        return [0.5] * len(images)

    rewards = [FunctionReward.of(innocent), FunctionReward.of(careless)]
    before = os.getcwd()
    if not overlap:
        scores_of(rewards[0], made_samples())
    other = threading.Thread(target=scores_of, args=(rewards[0], made_samples()))
    if overlap:
        other.start()
    with pytest.raises(ValueError, match="changed the current folder") as raised:
        scores_of(rewards[1], made_samples())
    changed.set()
    if overlap:
        other.join()
    assert ("one of" in str(raised.value), "innocent" in str(raised.value)) == (overlap, overlap)
    assert os.getcwd() == before


@pytest.mark.slow
def test_point_1_8_an_error_of_the_run_itself_names_the_reward_that_changed_a_setting_in_the_background(tmp_path):
    """With dtype float64, the rollout of the second chunk fails while the first is still being scored."""

    @retouch.reward(low=0, high=1)
    def careless(images, **rest):
        if len(calls) > 4:
            torch.set_default_dtype(torch.float64)
            time.sleep(2)
        calls.append(1)
        return [index / 10 for index in range(len(images))]

    calls: list[int] = []
    keys = {**SMALL, "rollout": {**SMALL["rollout"], "chunk": 2}, "group_size": 4, "eval": {"tasks": 2}}
    rows = [{"prompt": f"a red circle {n}"} for n in range(6)]
    trainer = retouch.Trainer(tiny_pipelines.sd3(), careless, rows, **keys, output_dir=tmp_path, run_name="r")
    with pytest.raises(
        ValueError, match=r"reward function careless changed torch's default dtype from torch.float32 to torch.float64"
    ):
        trainer.train()
    assert torch.get_default_dtype() == torch.float32


def stops(images, **rest):
    sys.exit(3)


def interrupts(images, **rest):
    raise KeyboardInterrupt


class StopsLater(SpoilsLater):
    def submit(self, samples):
        future: Future[Scores] = Future()
        future.set_exception(SystemExit(3))
        return future


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (FunctionReward.of(stops), r"reward function stops raised SystemExit: 3\n  .*sys.exit\(3\)\n  sample: task 'a'"),
        (FunctionReward.of(interrupts), r"reward function interrupts raised KeyboardInterrupt"),
        (CompositeReward({"one": FunctionReward.of(stops)}), "reward one: reward function stops raised SystemExit: 3"),
        (StopsLater(), "the reward raised SystemExit: 3"),
    ],
)
def test_point_3_8_a_reward_that_exits_ends_the_run_with_its_name(reward, says):
    with pytest.raises(ValueError, match=says):
        submitted(reward, made_samples())
    with pytest.raises(KeyboardInterrupt):  # on the main thread it is Ctrl-C
        scores_of(FunctionReward.of(interrupts), made_samples())


@pytest.mark.parametrize("served", [False, True])
def test_point_1_8_small_differences_of_large_scores_are_kept(served):
    class Large(Spoils):
        columns: ClassVar = {"score": Column(0.0, 2e6), "half": Column(0.0, 0.7)}

        def __call__(self, samples):
            values = [1e6 + 0.01 * sample.image.getpixel((0, 0))[0] for sample in samples]
            return {"score": values, "half": np.full(len(values), 0.7)}

    samples = [Sample(Task("a", "b"), Image.new("RGB", (2, 2), (number, 0, 0))) for number in range(4)]
    if served:
        with live(host(Large(), "large")) as server, closing(remote([server.url])) as client:
            rewards = RewardScorer(client, "2 * score")(samples).rewards
    else:
        rewards = submitted(Large(), samples)["score"] * 2
    group = torch.zeros(4, dtype=torch.long)
    small = torch.arange(4) * 0.02
    for weigh in (retouch.core.group_relative, retouch.core.best_of_group, retouch.core.exponential_weights):
        torch.testing.assert_close(weigh(rewards, group), weigh(small, group), rtol=1e-5, atol=1e-5)
    assert retouch.core.zero_std_groups(rewards, group) == 0.0
    scaled = retouch.core.rescale_rewards(rewards, low=2e6, high=2e6 + 0.06)
    torch.testing.assert_close(scaled, torch.tensor([-1.0, -1 / 3, 1 / 3, 1.0]), rtol=1e-4, atol=1e-4)
