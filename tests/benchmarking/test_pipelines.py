"""Pipelines of diffusers in a benchmark: noise by item, several images and turns, call arguments, and unsupported ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from PIL import Image

import tiny_flux2
import tiny_pipelines
from retouch.core.random import generator
from retouch.records.files import read_json, write_json
from retouch.rewards.pixels import ShareReward
from retouch.types import Column
from retouch_bench.running import run
from retouch_bench.suite import Suite, SuiteItem


class TurnSuite(Suite):
    """Three edits of red images, one of them with a second turn, and an item whose source is damaged; two images of each."""

    folder: str

    name: ClassVar[str] = "turns"
    title: ClassVar[str] = "Turns"
    source: ClassVar[str] = "https://example.org"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[int] = 4
    protocol: ClassVar[str] = "The share of red."
    task = "editing"
    needs_data = False
    turns = 2
    images_per_item = 2
    columns: ClassVar[Mapping[str, Column]] = {"share": Column(0.0, 1.0)}
    headline_column: ClassVar[str] = "share"

    def items(self, data):
        root = Path(self.folder)
        Image.new("RGB", (8, 8), "red").save(root / "red.png")
        (root / "damaged.png").write_bytes(b"no image")
        items = [
            SuiteItem(id="a/1", prompt="less", source=root / "red.png", cluster="red"),
            SuiteItem(id="b", prompt="less", later=("still less",), source=root / "red.png", cluster="red"),
            SuiteItem(id="c", prompt="less", source=root / "damaged.png"),
        ]
        return items, []

    def reward(self, judge):
        return ShareReward(channel="red")


class Fading:
    """A pipeline that mixes its source with grey, and writes a random number from its generator into the first pixel."""

    def __init__(self):
        self.calls: list[tuple[str, float]] = []

    def __call__(self, prompt, image, generator, strength=0.5):
        drawn = float(torch.rand(1, generator=generator))
        self.calls.append((prompt, drawn))
        made = Image.blend(image, Image.new("RGB", image.size, "grey"), strength)
        made.putpixel((0, 0), (int(255 * drawn), 0, 0))
        return SimpleNamespace(images=[made])


def test_turns_edit_the_previous_image_and_every_image_has_its_own_noise(tmp_path):
    suite, pipeline = TurnSuite(folder=str(tmp_path)), Fading()
    found = run(suite, model=pipeline, out=tmp_path / "out", call={"strength": 0.25})
    names = sorted(path.name for path in (tmp_path / "out" / "images").iterdir())
    assert names == ["a%2F1-0.png", "a%2F1-1.png", "b-0-turn2.png", "b-0.png", "b-1-turn2.png", "b-1.png"]
    assert [prompt for prompt, _ in pipeline.calls] == ["less"] * 4 + ["still less"] * 2
    assert len({drawn for _, drawn in pipeline.calls}) == 6
    shares = {(row.item, row.turn, row.sample): row.scores["share"] for row in found.rows}
    assert shares["b", 2, 0] < shares["b", 1, 0]
    assert {each["item"] for each in found.missing} == {"c"}
    assert "damaged.png" in found.missing[0]["reason"]
    assert set(found.table) == {"all", "turn 1", "turn 2"}
    assert (found.table["all"]["share"]["n"], found.table["turn 2"]["share"]["n"]) == (2, 1)
    assert found.table["all"]["share"]["low"] is None, "both items share one source image"
    with pytest.raises(ValueError, match="images of another seed"):
        run(suite, model=Fading(), seed=1, out=tmp_path / "out", call={"strength": 0.25})
    (tmp_path / "out" / "images" / "b-1.png").unlink()
    again = Fading()
    run(suite, model=again, out=tmp_path / "out", call={"strength": 0.25})
    assert again.calls == [pipeline.calls[3]]


class PromptSuite(TurnSuite):
    """A prompt for an image."""

    task = "text-to-image"
    turns = images_per_item = 1

    def items(self, data):
        return [SuiteItem(id=str(row), prompt="a red circle") for row in range(2)], []


def test_a_diffusers_pipeline_makes_images_and_unsupported_arguments_or_suites_raise(tmp_path):
    pipeline, suite = tiny_pipelines.sd3(), PromptSuite(folder=str(tmp_path))
    call = {"num_inference_steps": 1, "height": 16, "width": 16}
    found = run(suite, model=pipeline, out=tmp_path / "out", call=call)
    assert found.about["model"]["model"] == "a loaded StableDiffusion3Pipeline"
    images = [Image.open(tmp_path / "out" / "images" / f"{row}.png") for row in range(2)]
    assert [image.size for image in images] == [(16, 16), (16, 16)]
    assert images[0].tobytes() != images[1].tobytes()
    with pytest.raises(ValueError, match="takes no such argument"):
        run(suite, model=pipeline, out=tmp_path / "other", call={"steps": 1})
    with pytest.raises(ValueError, match="edits images, and StableDiffusion3Pipeline takes no image"):
        run(TurnSuite(folder=str(tmp_path)), model=pipeline, out=tmp_path / "other")


class ListedSuite(PromptSuite):
    """A prompt for each line of a file; the ids are the numbers of the lines."""

    def items(self, data):
        return [SuiteItem(id=str(row), prompt=line) for row, line in enumerate(data.read_text().splitlines())], []


class Plain:
    """A pipeline that returns a red image."""

    def __call__(self, prompt, generator):
        return SimpleNamespace(images=[Image.new("RGB", (8, 8), "red")])


def test_images_of_another_data_file_are_not_used_again(tmp_path):
    suite, out = ListedSuite(folder=str(tmp_path)), tmp_path / "out"
    for name, words in {"first": "a dog\na cat", "copy": "a dog\na cat", "second": "a dog\na house"}.items():
        (tmp_path / name).write_text(words)
    run(suite, model=Plain(), data=tmp_path / "first", subset=1, out=out)
    run(suite, model=Plain(), data=tmp_path / "copy", out=out)
    with pytest.raises(ValueError, match=r"images of another data set: '\w{16}' there, '\w{16}' now; give another --out"):
        run(suite, model=Plain(), data=tmp_path / "second", subset=1, out=out)
    older = {key: value for key, value in read_json(out / "benchmark.json").items() if key != "data_set"}
    write_json(out / "benchmark.json", older)
    assert run(suite, model=Plain(), data=tmp_path / "first", out=out) is not None


def three_frames(root):
    """KRIS-Bench with one item, which has three source images."""
    frames = [Image.new("RGB", (64, 64), (80 * row, 0, 0)) for row in range(3)]
    folder = root / "temporal_prediction"
    folder.mkdir()
    for row, frame in enumerate(frames):
        frame.save(folder / f"{row}.png")
    item = {"ori_img": ["0.png", "1.png", "2.png"], "ins_en": "draw the next frame"}
    (folder / "annotation.json").write_text(json.dumps({"1": item}))
    return frames


def test_a_pipeline_that_takes_several_images_gets_all_source_images(tmp_path):
    frames, pipeline = three_frames(tmp_path), tiny_flux2.pipeline()
    call = {"num_inference_steps": 1, "height": 64, "width": 64, "max_sequence_length": 64}
    assert run("kris", model=pipeline, judge="share:red", data=tmp_path, call=call, audit=False, out=tmp_path / "out") is not None
    noise = generator(0, "benchmark", 0, 0)
    expected = pipeline(prompt="draw the next frame", image=frames, generator=noise, **call).images[0]
    made = Image.open(tmp_path / "out" / "images" / "temporal_prediction-1.png")
    assert made.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("model", "kind"), [(Fading(), "Fading"), ("quickstart", "playground")])
def test_an_item_with_more_source_images_than_the_model_takes_is_missing_with_the_reason(model, kind, tmp_path):
    three_frames(tmp_path)
    found = run("kris", model=model, judge="share:red", data=tmp_path, audit=False, out=tmp_path / "out")
    (missing,) = found.missing
    assert missing["reason"] == f"the item has 3 source images, and {kind} takes 1"
