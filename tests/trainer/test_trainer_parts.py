"""The parts without a run: ``retouch.sample``, ``retouch.load_run``, ``retouch.serve``, and the images of a loaded policy."""

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import ExifTags, Image

import retouch
import tiny_pipelines
import tiny_writers
from retouch.data.images import load_image
from retouch.inference import sampling
from retouch.trainer import loaded_run
from retouch.trainer.loaded_run import LoadedPolicy
from retouch.types import Column, Task
from small_trainer import redness

PROMPTS = [{"prompt": text} for text in ("a red circle", "blue", "green")]
DRAW = {"num_inference_steps": 2, "height": 32, "width": 32, "max_sequence_length": 20, "output_type": "pt"}

STRANGER = """
from retouch.types import Column

class StrangeReward:
    columns = {"zero": Column(0.0, 1.0)}
    def __init__(self, *, device="cpu"):
        pass
    def __call__(self, samples):
        return {"zero": [0.0] * len(samples)}
"""


class Never:
    """A reward that is never called."""

    def __init__(self, name, column):
        self.name, self.columns = name, column

    def __call__(self, samples):
        raise AssertionError


def trainer(out, model, **changes):
    common: dict[str, Any] = {"learning_rate": 1e-2, "tasks_per_step": 1, "group_size": 2, "steps": 1, "device": "cpu"}
    common |= {"peft_config": retouch.Lora(rank=2, alpha=4), "trackers": (), "progress": False, "size": 32}
    return retouch.Trainer(model, redness, PROMPTS, output_dir=out, run_name="run", **{**common, **changes})


def drawn(pipe):
    return pipe("blue", generator=torch.Generator().manual_seed(3), **DRAW).images


def test_scalars_of_numpy_and_torch_are_read_as_numbers(tmp_path):
    changes = {"learning_rate": np.float32(0.25), "steps": np.int64(3), "size": np.int64(32), "max_missing": np.float64(0.5)}
    changes |= {"checkpoints": {"every": torch.tensor(4)}, "reward_weights": {"redness": np.float32(2.0)}}
    made = trainer(tmp_path, tiny_pipelines.sd3(), gradient_checkpointing=np.bool_(True), **changes).recipe
    assert (made.learning_rate, made.steps, made.checkpoints.every, made.reward.max_missing) == (0.25, 3, 4, 0.5)
    assert made.reward.combine == {"redness": 2.0}
    assert made.policy.gradient_checkpointing is True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A pipeline that is saved."""
    made = tmp_path_factory.mktemp("sd3")
    tiny_pipelines.sd3().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run that has loaded it."""
    section = retouch.models.SD3(path=str(folder), size=(32, 32), dtype="float32")
    sampling = {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}}
    made = trainer(tmp_path_factory.mktemp("runs"), section, rollout=sampling, ema={"decay": 0.5}, steps=2)
    made.train()
    return made.folder


def test_sample_returns_images_states_and_log_probs_without_a_run():
    pipe = tiny_pipelines.sd3()
    made = retouch.sample(pipe, ["a red circle", "blue", "green"], group_size=2, num_steps=4, size=32, batch=4, seed=1)
    assert len(made) == len(made.images) == 6
    assert made.log_probs.shape == (6, 3)
    assert made.log_probs.isfinite().all()
    assert made.states.shape[:2] == (6, 4)
    assert made.sigmas.shape == (5,)
    assert len({image.tobytes() for image in made.images if image is not None}) == 6
    last = retouch.sample(pipe, ["a red circle", "blue", "green"], group_size=2, num_steps=4, size=32, batch=99, seed=1)
    torch.testing.assert_close(last.log_probs, made.log_probs, atol=1e-5, rtol=1e-4)
    cps = retouch.sample(pipe, "blue", group_size=1, sde=retouch.CPSTransition(noise_level=0.5), num_steps=2, size=32)
    assert cps.log_probs.shape == (1, 1)
    fixed = retouch.sample(pipe, "blue", group_size=1, sde=None, num_steps=2, size=32, guidance_scale=2.0)
    assert fixed.log_probs.isnan().all()
    assert not pipe.vae.training


def test_sample_uses_the_trained_lora_and_does_not_change_the_pipeline(tmp_path):
    pipe = tiny_pipelines.sd3()
    options: dict[str, Any] = {"group_size": 1, "sde": None, "num_steps": 2, "size": 32}
    before = retouch.sample(pipe, "blue", **options)
    trainer(tmp_path, pipe).train()
    after = drawn(pipe)
    trained = retouch.sample(pipe, "blue", **options)
    assert not torch.equal(trained.states, before.states)
    assert torch.equal(drawn(pipe), after)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "0 prompts, group_size 8: give at least one prompt"),
        ({"group_size": 0}, "1 prompts, group_size 0: give at least one prompt"),
        ({"images": []}, "images: 0 for 1 prompts; give one source image for each"),
        ({"num_steps": 1}, "rollout.num_steps: 1 leaves no step to train besides the last"),
        ({"size": "big"}, r"size: 'big'; give \(height, width\)"),
        ({"pipe": tiny_writers.module("qwen2.5"), "size": None}, "processing_class: missing"),
    ],
)
def test_wrong_arguments_of_sample_raise(arguments, message):
    given = {"pipe": tiny_pipelines.sd3(), "prompts": ["blue"], "size": 32, **arguments}
    with pytest.raises(ValueError, match=message):
        retouch.sample(given.pop("pipe"), given.pop("prompts"), **given)


def test_a_run_is_loaded_with_its_pipeline_and_tables(run, folder):
    loaded = retouch.load_run(run)
    (image,) = loaded.policy.sample(["blue"], seed=1)
    assert loaded.step == 2
    pipe = loaded.pipeline()
    assert np.array_equal(loaded.policy.sample(["blue"], seed=1)[0], image), "the pipeline and the policy share the average"
    fresh = tiny_pipelines.sd3()
    assert not torch.allclose(drawn(fresh), drawn(pipe), atol=1e-4)
    retouch.Trainer.from_recipe(loaded.recipe.document() | {"out": str(run.parent)})
    task = Task("0", "blue")
    (own,) = sampling.sample_tasks(loaded._parts[0], [task], 1)
    assert np.array_equal(own.image, image)
    assert list(loaded.metrics["step"]) == [1, 2]
    assert loaded.metrics["reward/mean"].between(0, 1).all()
    assert set(loaded.evaluations.query("row == 'all'")["step"]) == {0, 2}
    ledger = loaded.ledger
    columns = ["split", "step", "group", "slot", "task", "image", "completion", "judge", "seconds", "at", "redness"]
    assert sorted(ledger.columns) == sorted(columns)
    assert len(ledger[ledger.split == "train"]) == 4
    assert loaded.samples().width > 0
    assert loaded.summary is not None
    with pytest.raises(ValueError, match="generates no text"):
        loaded.policy.generate(["blue"])
    with pytest.raises(ValueError, match=f"model: the run loads {folder} itself"):
        retouch.load_run(run, model=fresh)


def test_loading_a_run_with_imported_classes_requires_consent(run, tmp_path, tmp_path_factory, monkeypatch):
    """Also for a recipe that is changed while it is opened, so that no consent is stored for it."""
    modules = tmp_path_factory.mktemp("modules")
    (modules / "stranger_of_parts.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    written = json.loads((copied / "recipe.json").read_text())
    written["recipe"]["reward"] = {"kind": "import", "class": "stranger_of_parts:StrangeReward", "combine": {"zero": 1.0}}
    (copied / "recipe.json").write_text(json.dumps(written))
    loaded = retouch.load_run(copied, device="cpu", allow_imports=["stranger_of_parts"])
    assert drawn(loaded.pipeline()).shape[0] == 1
    with pytest.raises(ValueError, match="stranger_of_parts:StrangeReward is code from outside Retouch"):
        retouch.load_run(copied, device="cpu")


def test_the_pipeline_of_a_loaded_run_makes_the_same_images_as_the_trained_one(tmp_path):
    pipe = tiny_pipelines.sd3()
    made = trainer(tmp_path, pipe)
    made.train()
    expected = drawn(pipe)
    with pytest.raises(ValueError, match="give it to load_run too"):
        retouch.load_run(made.folder).pipeline()
    assert len(retouch.load_run(made.folder).metrics) == 1
    again = retouch.load_run(made.folder, model=tiny_pipelines.sd3())
    assert torch.equal(drawn(again.pipeline()), expected)


def test_a_loaded_writer_run_generates_text_and_images(tmp_path):
    options = {"renderer": {"model": tiny_pipelines.sd3(), "num_steps": 2, "cut_off": "draw"}, "size": 32}
    objects = {"processing_class": tiny_writers.tokenizer(), "rollout": {"kind": "tokens", "max_new_tokens": 5}}
    made = trainer(tmp_path, tiny_writers.module("qwen2.5"), **options, **objects)
    made.train()
    again = retouch.load_run(
        made.folder, model=tiny_writers.module("qwen2.5"), processing_class=tiny_writers.tokenizer(), renderer=tiny_pipelines.sd3()
    )
    (output,) = again.policy.generate(["blue"])
    assert isinstance(output.text, str)
    assert again.policy.sample(["blue"])[0].size == (32, 32)
    with pytest.raises(ValueError, match="the policy of this run is a language model"):
        again.pipeline()


def test_rewards_are_served_from_this_process():
    with retouch.serve(redness, retouch.rewards.load("compressibility"), port=0) as server:
        remote = retouch.rewards.load("remote", endpoints=(server.url,))
        images = [Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")]
        assert remote(images)["redness/redness"] == [1.0, 0.0]
        assert "compressibility/compressibility" in remote.columns
        remote.close()
        with pytest.raises(ValueError, match="give another port, or 0 for a free one"):
            retouch.serve(redness, port=int(server.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ((), {}, "give at least one reward"), ((redness,), {"host": "0.0.0.0"}, "reachable from other machines: give a token"),
        ((redness,), {"host": "0.0.0.0", "token": "short"}, "the token must have at least 16 characters"),
        ((redness,), {"host": "0.0.0.0", "token": "pässwörter-sind-geheim"}, "the token must have at least 16 characters"),
        ((redness,), {"token": "with spaces, but long enough"}, "the token must have at least 16 characters"),
        ((redness, "compressibility", redness), {}, "two rewards have the name redness"),
        ((Never("my judge", {"red": Column(0.0, 1.0)}),), {}, "'my judge' cannot be a reward's name: use letters, digits, dots"),
        ((Never("toowide", {"wide": Column(0.0, 1e10)}),), {}, "toowide: column 'wide' has the range 0.0 to 10000000000.0"),
        (("pikscore",), {}, "pikscore"),
        ((3,), {}, "3 cannot be called"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_serve_raise(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        retouch.serve(*rewards, port=0, **options)


def test_an_impossible_address_of_a_server_and_a_server_that_ends_while_it_starts_raise(monkeypatch):
    for host, port in (("127.0.0.1", 70000), ("127.0.0.1", -1), ("nosuch.invalid", 0)):
        with pytest.raises(ValueError, match=f"port {port} of {host}: .*; give another port, or 0 for a free one"):
            retouch.serve(redness, host=host, port=port, token="a-token-of-enough-characters")
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)  # as if a library's start-up failed
    with pytest.raises(RuntimeError, match="ended while it was starting"):
        retouch.serve(redness, port=0)


@pytest.fixture
def received(monkeypatch):
    """The tasks that reach the policy."""
    tasks: list[Task] = []

    def sample_tasks(parts, given, seed, *, context):
        tasks.extend(given)
        return []

    for module in (sampling, loaded_run):  # of the command, and of ``LoadedPolicy``
        monkeypatch.setattr(module, "sample_tasks", sample_tasks)
    return tasks


def saved(path, mode):
    colours = np.random.default_rng(0).integers(0, 255, (6, 4, 4), dtype=np.uint8)
    image, exif = Image.fromarray(colours, "RGBA"), Image.Exif()
    if mode == "rotated":
        exif[ExifTags.Base.Orientation] = 6
    grey = Image.fromarray(colours[..., 0].astype(np.uint16) * 200)
    (grey if mode == "I;16" else image.convert("RGB" if mode == "rotated" else mode)).save(path, exif=exif)
    return path


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16", "rotated"])
def test_an_opened_image_and_its_path_become_the_same_source_as_in_the_command(mode, tmp_path, received):
    path = saved(tmp_path / "a.png", mode)
    LoadedPolicy(None).sample(["blue"] * 4, images=[Image.open(path), path, str(path), path.read_bytes()])
    expected = load_image(path)
    for task in received:
        (image,) = task.images
        assert image.mode == "RGB"
        assert np.array_equal(image, expected)


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        (["a"], {"masks": [Image.new("L", (3, 6))]},
         r"masks\[0\]: its size is \(3, 6\), but that of its image \(4, 6\); they must be equal"),
        (["a"], {"masks": [Image.new("RGBA", (4, 6))]}, r"masks\[0\]: an image of the table: a mask with transparent parts"),
        (["a"], {"masks": []}, r"masks: 0 for 1 prompts"),
        (["a"], {"references": ["no.png"]}, r"references\[0\]: no\.png: no such file"),
        ([], {"images": None}, "prompts: the list is empty; give at least one prompt"),
        ([], {"images": []}, "prompts: the list is empty; give at least one prompt"),
        (["a", "b"], {"images": [None, 3]}, r"images\[1\]: should be a PIL image, a path or the bytes of a file, not int"),
        (["a", "b"], {"images": [None, "no.png"]}, r"images\[1\]: no\.png: no such file"),
        (["a"], {"images": Image.new("F", (4, 4))}, r"images\[0\]: an image of mode F, whose range is not known"),
    ],
)  # fmt: skip
def test_wrong_prompts_images_masks_and_references_raise_with_their_place(prompts, given, message, tmp_path, received):
    path = saved(tmp_path / "a.png", "RGB")
    with pytest.raises(ValueError, match=message):
        LoadedPolicy(None).sample(prompts, **{"images": [path], **given})
    assert received == []
