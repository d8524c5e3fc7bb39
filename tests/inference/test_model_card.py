"""The model card of an export: valid metadata, code that loads the weights, and the scores of the run."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from retouch.inference.exporting import export_target
from retouch.inference.model_card import _base_model, _metadata, _scores, _use
from retouch.models.flux.family import FluxKontextModel, FluxModel
from retouch.models.flux2.family import Flux2KleinModel
from retouch.models.qwen_image.family import QwenImageModel
from retouch.models.qwen_image_2.family import QwenImage2Model
from retouch.models.sd3.family import SD3Model
from retouch.models.z_image.family import ZImageModel
from retouch.recipe.recipe import parse
from retouch.records.files import write_json
from retouch.records.folder import RunFolder
from retouch.run.session import run
from tiny_recipes import SMALL

LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "comfyui_lora.safetensors")


def test_the_model_card_has_valid_metadata_code_and_scores(tmp_path: Path) -> None:
    recipe = parse({**SMALL, "out": str(tmp_path / "runs")})
    run(recipe, fresh=False)
    export_target(str(recipe.folder), to=tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md", ignore_metadata_errors=False)
    data = card.data.to_dict()
    assert data["library_name"] == "peft", "diffusers does not make a playground model's images as in training"
    assert data["tags"] == ["retouch", "reinforcement-learning", "lora"]
    assert "base_model" not in data, "a folder on this machine is no model on the Hub"
    assert str(tmp_path) not in card.content
    assert "BASE_MODEL" not in card.text
    assert f"a playground model of Retouch ({Path(recipe.policy.model.source).name})" in card.text
    assert "`retouch sample RUN`" in card.text
    first, last = RunFolder(recipe.folder).read_evals()
    row = next(line for line in card.text.splitlines() if line.startswith("| overall |"))
    assert [float(cell) for cell in row.split("|")[2:4]] == [
        pytest.approx(line["table"]["all"]["overall"], rel=1e-3) for line in (first, last)
    ]
    with Image.open(tmp_path / "out" / "before-and-after.png") as image:
        assert image.width > 256
    assert "](before-and-after.png)" in card.text
    assert "comfyui_lora.safetensors" in card.text
    for code in re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL):
        ast.parse(code)


def test_the_model_card_mentions_tasks_without_a_score(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step, missing in ((0, {}), (1, {}), (2, {"overall": 1})):
        folder.write_eval(step, "heldout", table={"all": {"n": 6, "overall": 5.0}}, ci95={}, missing=missing)
    at_1, at_2 = (_scores(folder, step, split="heldout") or "" for step in (1, 2))
    assert at_1.startswith("Means over 6 held-out tasks.")
    assert at_2.startswith("Means over 6 held-out tasks; tasks without a score are left out.")


def test_the_table_has_the_paired_change_of_the_tasks_with_both_scores(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "evals").mkdir()
    for step, scores in ((0, [4.0, 5.0, 6.0]), (2, [5.0, 5.5, None])):
        folder.write_eval(step, "heldout", table={"all": {"n": 3, "overall": 5.0, "IP": 9.0}}, ci95={})
        write_json(folder.evaluation(step), {"tasks": ["a", "b", "c"], "rewards": scores, "scores": {"overall": scores}})
    header, _, *rows = (_scores(folder, 2, split="heldout") or "").splitlines()[-4:]
    assert header == "| score | before | after 2 steps | change (95 % interval) |"
    # The changes are 1 and 0.5, so the standard error of their mean is 0.25; t(1) = 12.706.
    assert rows == ["| overall | 5 | 5 | +0.75 (-2.43 to +3.93) |", "| IP | 9 | 9 |  |"]


def test_the_card_of_a_run_without_samples_and_evaluations_has_no_scores(tmp_path: Path) -> None:
    recipe = parse({**SMALL, "out": str(tmp_path / "runs"), "samples": {**SMALL.get("samples", {}), "every": 0}})
    run(recipe, fresh=False)
    for folder in recipe.folder.glob("samples/*"):
        folder.rename(tmp_path / folder.name)
    RunFolder(recipe.folder).evals.unlink()
    names = {file.name for file in export_target(str(recipe.folder), to=tmp_path / "out", format="comfyui")}
    assert names == {"README.md", "export.json", "comfyui_lora.safetensors"}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "## Evaluation" not in text
    assert "load_lora_weights" not in text
    assert "| steps | 2 |" in text


@pytest.mark.parametrize(
    ("base", "family", "licence"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", SD3Model, ("other", "stabilityai-ai-community")),
        ("black-forest-labs/FLUX.1-schnell", FluxModel, ("apache-2.0", None)),
        ("black-forest-labs/FLUX.1-Kontext-dev", FluxKontextModel, ("other", "flux-1-dev-non-commercial-license")),
        ("black-forest-labs/FLUX.2-klein-4B", Flux2KleinModel, ("apache-2.0", None)),
        ("black-forest-labs/FLUX.2-klein-9B", Flux2KleinModel, ("other", "flux-non-commercial-license")),
        ("Qwen/Qwen-Image", QwenImageModel, ("apache-2.0", None)),
        ("Qwen/Qwen-Image-2.1", QwenImage2Model, (None, None)),
        ("Tongyi-MAI/Z-Image-Turbo", ZImageModel, ("apache-2.0", None)),
        ("someone/a-model", ZImageModel, (None, None)),
    ],
)
def test_cards_have_base_model_and_licence(tmp_path: Path, base: str, family: Any, licence: tuple[str | None, str | None]) -> None:
    for name in LORA_FILES:
        (tmp_path / name).touch()
    assert _base_model("python:" + base) == (base, True)
    data = _metadata(tmp_path, base, family)
    assert (data["base_model"], data["base_model_relation"]) == (base, "adapter")
    assert (data.get("license"), data.get("license_name")) == licence
    assert data["pipeline_tag"] == ("image-to-image" if family is FluxKontextModel else "text-to-image")
    text = "\n".join(_use(tmp_path, family.pipeline, "Transformer", base=base, dtype="float32"))
    assert f'{family.pipeline}.from_pretrained("{base}", torch_dtype=torch.float32)' in text
    assert "models/loras" in text


def test_the_card_of_full_weights_says_finetune_and_loads_the_transformer(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    assert _metadata(tmp_path, "someone/a-model", SD3Model)["base_model_relation"] == "finetune"
    text = "\n".join(_use(tmp_path, SD3Model.pipeline, "SD3Transformer2DModel", base="someone/a-model", dtype="float16"))
    assert 'SD3Transformer2DModel.from_pretrained("FOLDER", subfolder="transformer", torch_dtype=torch.float16)' in text
    assert "transformer=transformer, torch_dtype=torch.float16)" in text
    unknown = "\n".join(_use(tmp_path, SD3Model.pipeline, "SD3Transformer2DModel", base="someone/a-model", dtype=None))
    assert 'from_pretrained("someone/a-model", transformer=transformer)' in unknown
    assert "torch" not in unknown
    assert "load_lora_weights" not in text
