"""The FLUX.1 family in recipes: the inputs of each kind, whole runs with tiny models, and their adapters in diffusers."""

import json
from pathlib import Path
from typing import Any, get_args

import diffusers
import pytest
import torch
from diffusers import FluxFillPipeline, FluxKontextPipeline, FluxPipeline
from PIL import Image, ImageChops
from safetensors.torch import load_file

import tiny_flux_runs
import tiny_models
from retouch import cli
from retouch.data.rows import InvalidRow, RequiredRows, RowRequirements
from retouch.data.sources.triplets import TripletRows
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_recipe, read_target
from retouch.inference.sampling import sample_target
from retouch.models.base import DiffusersModel, TaskInputs
from retouch.models.flux.model import FluxKontext, FluxText
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.qwen_image import QwenImageEditModel, QwenImageEditPlusModel
from retouch.recipe.recipe import parse
from retouch.run.session import run

KINDS = {"flux": FluxPipeline, "flux-fill": FluxFillPipeline, "flux-kontext": FluxKontextPipeline}
PROMPTS = {"kind": "prompts", "held_out": 1}


@pytest.fixture(autouse=True)
def short_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad T5's input to 30 tokens instead of 512 and keep source images small; tiny models would spend all their time on them."""
    original = FluxText.__init__

    def shorter(self: FluxText, *parts: Any, max_sequence_length: int = 30, **named: Any) -> None:
        original(self, *parts, max_sequence_length=max_sequence_length, **named)

    monkeypatch.setattr(FluxText, "__init__", shorter)
    monkeypatch.setattr(FluxKontext, "source_as_is", True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("flux")
    tiny_models.save_flux(made / "flux")
    tiny_models.save_flux(made / "fill", fills=True)
    return {"flux": made / "flux", "flux-fill": made / "fill", "flux-kontext": made / "flux"}


@pytest.fixture
def triplets(tmp_path: Path) -> Path:
    return tiny_flux_runs.make_triplets(tmp_path / "triplets", {3: "red", 11: "blue-ish", 17: "green"})


def recipe_of(kind: str, folders: dict[str, Path], triplets: Path) -> dict[str, Any]:
    model = {"kind": kind, "path": str(folders[kind]), "size": [32, 48]}
    made = tiny_flux_runs.small(model, triplets, triplets.parent / "runs")
    if kind == "flux":
        prompts = triplets.parent / "prompts.txt"
        prompts.write_text("a red circle\nblue\ngreen\n")
        made["data"] = {**PROMPTS, "path": str(prompts)}
    return made


# The attributes that a family declares


def test_every_image_model_kind_declares_its_attributes() -> None:
    for kind in IMAGE_MODELS:
        section = IMAGE_MODELS.load(kind)
        assert section is not None
        assert kind in get_args(section.model_fields["kind"].annotation)
        if issubclass(section, DiffusersModel):
            assert section.lora_targets
            assert section.pipeline in dir(diffusers)
            assert isinstance(section.takes, TaskInputs)
            assert callable(section.adapter_class().from_pretrained)
    for editor in (QwenImageEditModel, QwenImageEditPlusModel):
        assert editor.takes.images == (1, editor.adapter_class().MOST_SOURCES)


def test_guidance_key_is_optional_and_reaches_the_model(folders: dict[str, Path], triplets: Path) -> None:
    told = recipe_of("flux-fill", folders, triplets)
    assert "guidance" not in parse(told).document()["policy"]["model"]
    told["policy"]["model"]["guidance"] = 12.0
    recipe = parse(told)
    assert recipe.document()["policy"]["model"]["guidance"] == 12.0
    assert parse(recipe.document()) == recipe
    model = recipe.policy.model
    built = model.build(device=torch.device("cpu"))
    assert built.guidance == 12.0
    assert model.model_copy(update={"guidance": None}).build(device=torch.device("cpu")).guidance == 30.0


def test_row_with_too_many_images_raises_with_its_line(triplets: Path) -> None:
    rows = TripletRows(triplets, reference="own")
    assert (
        RequiredRows(rows, RowRequirements(images=(1, 1), mask=True, model="flux-fill", takes="one picture and a mask"))[1].text
        == "blue-ish"
    )
    with pytest.raises(InvalidRow, match=r"self_bench\.txt:2: error: flux takes no picture, and this row has 1 image$"):
        RequiredRows(rows, RowRequirements(images=(0, 0), model="flux", takes="no picture"))[1]


def test_missing_mask_in_a_data_folder_raises_before_the_model_is_loaded(
    tmp_path: Path, folders: dict[str, Path], triplets: Path
) -> None:
    tiny_models.image(0, 32, 48).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "instruction": "red"}\n')
    made = recipe_of("flux-fill", folders, triplets) | {"data": {"kind": "folder", "path": str(tmp_path)}}
    made["policy"]["model"]["path"] = "nowhere/nothing"
    with pytest.raises(
        ValueError, match=r"metadata\.jsonl:1: error: flux-fill takes one image and a mask, and this row has no mask"
    ):
        run(parse(made), fresh=False)


# Whole runs


@pytest.fixture
def trained(request: Any, folders: dict[str, Path], triplets: Path) -> tuple[str, Path]:
    kind = request.param
    recipe = parse(recipe_of(kind, folders, triplets))
    assert run(recipe, fresh=False) == 0
    return kind, recipe.folder


def rendered(pipe: Any, kind: str) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {} if kind == "flux" else {"image": tiny_models.image(0, 32, 48)}
    if kind == "flux-fill":
        given["mask_image"] = Image.new("L", (48, 32), 255)
    if kind == "flux-kontext":
        given |= {"max_area": 32 * 48, "_auto_resize": False}
    settings = {"height": 32, "width": 48, "num_inference_steps": 2, "max_sequence_length": 30, "output_type": "pt"}
    made: torch.Tensor = pipe(prompt="a red circle", **given, **settings, generator=torch.Generator().manual_seed(3)).images
    return made


@pytest.mark.parametrize("trained", KINDS, indirect=True)
def test_diffusers_loads_the_adapter_and_generates_the_same_images(
    trained: tuple[str, Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    kind, folder = trained
    export_target(str(folder), to=tmp_path / "out")
    parts, _ = open_recipe(*read_target(str(folder)), trained=True)
    parts.judge.close()
    ours = KINDS[kind].from_pretrained(folders[kind], transformer=parts.model.module)
    theirs = KINDS[kind].from_pretrained(folders[kind])
    untrained = rendered(theirs, kind)
    theirs.load_lora_weights(tmp_path / "out")
    assert torch.equal(rendered(theirs, kind), rendered(ours, kind))
    assert not torch.equal(rendered(theirs, kind), untrained)


@pytest.mark.parametrize("trained", ["flux-fill"], indirect=True)
def test_sample_target_depends_on_the_instruction_and_requires_a_mask(
    trained: tuple[str, Path], triplets: Path, tmp_path: Path
) -> None:
    _, folder = trained
    given = {"image": triplets / "test3_source.png", "mask": triplets / "test3_mask.png", "seed": 0}
    first = sample_target(str(folder), instruction="blue", out=tmp_path / "a.png", **given)
    other = sample_target(str(folder), instruction="green", out=tmp_path / "b.png", **given)
    assert first.image.size == tiny_flux_runs.SIZE
    assert ImageChops.difference(first.image, other.image).getbbox() is not None
    with pytest.raises(ValueError, match="fills the masked part of an image; give a mask with --mask"):
        sample_target(str(folder), instruction="blue", out=tmp_path / "c.png", **{**given, "mask": None})


# A warm-up and then RL on triplets

TINY = "recipes/flux-fill/tiny.jsonnet"


def tiny_run(root: Path, name: str, *, warm_up: int, rl: int) -> tuple[Path, str]:
    """Run the tiny recipe on a folder with one valid and one invalid item; return the folder of the run and the text of its log."""
    data = tiny_flux_runs.make_triplets(root / "items", {11: "Azir", 17: "Baby"})
    (data / "test17_ref.png").unlink()
    changes = {"data.path": data, "data.allow_test_sets": "true", "out": root / "runs", "name": name, "trackers": "[]"}
    changes |= {"phases.0.steps": warm_up, "phases.1.steps": rl, "phases.0.tasks_per_step": 1}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert cli.main(["train", TINY, *words]) == 0
    folder = root / "runs" / name
    return folder, (folder / "train.log").read_text()


@pytest.mark.slow
def test_tiny_recipe_trains_on_the_valid_item_and_reports_the_invalid_one(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr")
    folder, log = tiny_run(tmp_path, "whole", warm_up=1, rl=1)
    for once in ("self_bench.txt:2: error: 'test17_ref.png': no such file", "skipped 1 of 2 rows", "items is Calligrapher's bench"):
        assert log.count(once) == 1, once
    assert "measures fit, not generalisation" in log
    assert "trained-on tasks after step 2" in log
    assert "held-out" not in log
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["warm-up", "rl"]
    assert lines[1]["policy/ratio_max_first"] <= 1e-6 < lines[1]["policy/ratio_max"]  # two inner passes
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["on"]) == (2, "1 trained-on task")
    page = (folder / "report.html").read_text()
    assert "<h2>Trained-on scores</h2>" in page
    assert "measure fit, not generalisation" in page
    assert "eld-out" not in page
    with pytest.raises(ValueError, match="are test sets, not for training"):
        cli.main(["train", TINY, "--set", f"data.path={tmp_path / 'items'}", "--set", f"out={tmp_path / 'other'}", "--debug"])


def test_phase_with_zero_steps_is_skipped_and_can_be_added_later(tmp_path: Path) -> None:
    pytest.importorskip("rapidocr")

    def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
        return load_file(folder / "checkpoints" / f"step-{step:06d}" / "weights.safetensors")

    whole, _ = tiny_run(tmp_path, "whole", warm_up=1, rl=1)
    parts, log = tiny_run(tmp_path, "parts", warm_up=1, rl=0)
    assert "phase warm-up: steps 1 to 1" in log
    assert "phase rl" not in log
    parts, _ = tiny_run(tmp_path, "parts", warm_up=1, rl=1)
    found, wanted = weights(parts, 2), weights(whole, 2)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    _, log = tiny_run(tmp_path, "rl", warm_up=0, rl=1)
    assert "phase warm-up" not in log
    assert "phase rl: steps 1 to 1" in log
