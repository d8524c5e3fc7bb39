"""The model card of an export, the images before and after training in it, and the push of an export to the Hub."""

import ast
import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.utils import close_session
from PIL import Image
from safetensors.torch import load

import hub_double
import retouch
from retouch.inference import exporting as publishing
from retouch.inference.exporting import _base_model, _metadata, _scores, _use, export_target, why_not_pushable
from retouch.recipe.recipe import parse
from retouch.records.files import write_json
from retouch.records.folder import RunFolder
from retouch.run.recorder import before_and_after
from retouch.run.session import run
from retouch_models.flux import FluxKontextModel, FluxModel
from retouch_models.flux2 import Flux2KleinModel
from retouch_models.qwen_image import QwenImageModel
from retouch_models.qwen_image_2 import QwenImage2Model
from retouch_models.sd3 import SD3Model
from retouch_models.z_image import ZImageModel
from retouch_plan.checks import check_push
from tiny_recipes import SMALL

LORA_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "comfyui_lora.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    recipe = parse({**SMALL, "out": str(tmp_path_factory.mktemp("runs"))})
    run(recipe, fresh=False)
    return recipe


def test_the_model_card_has_valid_metadata_code_and_scores(tmp_path, trained):
    recipe = trained
    export_target(str(recipe.folder), to=tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md", ignore_metadata_errors=False)
    data = card.data.to_dict()
    assert data["library_name"] == "peft", "diffusers does not make a playground model's images as in training"
    assert data["tags"] == ["retouch", "reinforcement-learning", "lora"]
    assert "base_model" not in data, "a folder on this machine is no model on the Hub"
    assert str(tmp_path) not in card.content
    assert str(recipe.folder) not in card.content
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


def test_the_model_card_mentions_tasks_without_a_score(tmp_path):
    folder = RunFolder(tmp_path)
    for step, missing in ((0, {}), (1, {}), (2, {"overall": 1})):
        folder.write_eval(step, "heldout", table={"all": {"n": 6, "overall": 5.0}}, ci95={}, missing=missing)
    at_1, at_2 = (_scores(folder, step, split="heldout") or "" for step in (1, 2))
    assert at_1.startswith("Means over 6 held-out tasks.")
    assert at_2.startswith("Means over 6 held-out tasks; tasks without a score are left out.")


def test_the_table_has_the_paired_change_of_the_tasks_with_both_scores(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "evals").mkdir()
    for step, scores in ((0, [4.0, 5.0, 6.0]), (2, [5.0, 5.5, None])):
        folder.write_eval(step, "heldout", table={"all": {"n": 3, "overall": 5.0, "IP": 9.0}}, ci95={})
        write_json(folder.evaluation(step), {"tasks": ["a", "b", "c"], "rewards": scores, "scores": {"overall": scores}})
    header, _, *rows = (_scores(folder, 2, split="heldout") or "").splitlines()[-4:]
    assert header == "| score | before | after 2 steps | change (95 % interval) |"
    assert rows == ["| overall | 5 | 5 | +0.75 |", "| IP | 9 | 9 |  |"], "two tasks are too few for an interval"


def test_the_card_of_a_run_without_samples_and_evaluations_has_no_scores(tmp_path, trained):
    folder = shutil.copytree(trained.folder, tmp_path / "small")
    shutil.rmtree(folder / "samples")
    RunFolder(folder).evals.unlink()
    names = {file.name for file in export_target(str(folder), to=tmp_path / "out", format="comfyui")}
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
        ("Qwen/Qwen-Image", QwenImageModel, ("apache-2.0", None)), ("Qwen/Qwen-Image-2.1", QwenImage2Model, (None, None)),
        ("Tongyi-MAI/Z-Image-Turbo", ZImageModel, ("apache-2.0", None)), ("someone/a-model", ZImageModel, (None, None)),
    ],
)  # fmt: skip
def test_cards_have_base_model_and_licence(tmp_path, base, family, licence):
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


def test_the_card_of_full_weights_says_finetune_and_loads_the_transformer(tmp_path):
    (tmp_path / "transformer").mkdir()
    assert _metadata(tmp_path, "someone/a-model", SD3Model)["base_model_relation"] == "finetune"
    text = "\n".join(_use(tmp_path, SD3Model.pipeline, "SD3Transformer2DModel", base="someone/a-model", dtype="float16"))
    assert 'SD3Transformer2DModel.from_pretrained("FOLDER", subfolder="transformer", torch_dtype=torch.float16)' in text
    assert "transformer=transformer, torch_dtype=torch.float16)" in text
    unknown = "\n".join(_use(tmp_path, SD3Model.pipeline, "SD3Transformer2DModel", base="someone/a-model", dtype=None))
    assert 'from_pretrained("someone/a-model", transformer=transformer)' in unknown
    assert "torch" not in unknown
    assert "load_lora_weights" not in text


def write_samples(folder, step, colour, *, size):
    place = RunFolder(folder).samples(step)
    place.mkdir(parents=True)
    Image.new("RGB", size, colour).save(place / "image.png")
    line = {"step": step, "set": "heldout", "task": "a", "instruction": "make it red", "group": 0, "slot": 0, "tags": {}}
    files = {"image": "image.png", "source": None, "target": None}
    line |= files | {"scores": {"match": 1.0}, "reward": 1.0, "advantage": None}
    (place / "samples.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(("size", "shown"), [((24, 12), (120, 60)), ((100, 50), (100, 50)), ((256, 128), (128, 64))])
def test_small_images_are_enlarged_and_large_images_reduced(tmp_path, size, shown):
    write_samples(tmp_path, 0, "red", size=size)
    write_samples(tmp_path, 20, "blue", size=size)
    sheet = before_and_after(tmp_path)
    assert sheet.size == (268, 170)
    top = 17  # below the prompt
    for left, colour in ((0, (255, 0, 0)), (134, (0, 0, 255))):
        corner = (left + shown[0] - 1, top + shown[1] - 1)
        assert sheet.getpixel(corner) == colour
        assert sheet.getpixel((left + shown[0], top)) == (255, 255, 255)
        for words in ((0, 0, 60, 15), (left, 147, left + 60, 160)):  # the prompt, and a score below each image
            assert len(sheet.crop(words).getcolors(99) or [0] * 99) > 3


REPO = "someone/edits"


@pytest.fixture
def hub(monkeypatch):
    with hub_double.serve() as hub:
        monkeypatch.setenv("HF_TOKEN", hub_double.TOKEN)
        monkeypatch.setattr(publishing, "HfApi", partial(HfApi, endpoint=hub.url))
        monkeypatch.setattr(publishing, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
        close_session()


def recipe(tmp_path, **push):
    return parse({**SMALL, "out": str(tmp_path), "push": {"repo": REPO, **push}})


def log_text(recipe):
    return RunFolder(recipe.folder).log(0).read_text()


def content_of(name, content):
    """The content to compare: the tensors of safetensors, whose header is written in any order; otherwise the bytes."""
    if not name.endswith(".safetensors"):
        return content
    return {key: tensor.tolist() for key, tensor in load(content).items()}


def test_a_push_uploads_the_files_of_an_export_of_its_step(tmp_path, hub, trained):
    pushing = recipe(tmp_path, every=1)
    assert run(pushing, fresh=False) == 0
    name = "checkpoints/step-000002/weights.safetensors"
    assert (pushing.folder / name).read_bytes() == (trained.folder / name).read_bytes(), "a push does not change the run"
    assert (hub.private, hub.branches) == ({REPO: True}, {REPO: {"main", "step-000001", "step-000002"}})
    exported = export_target(str(pushing.folder), to=tmp_path / "exported")
    wanted = {path.name: path.read_bytes() for path in exported}
    for revision in ("main", "step-000002"):
        sent = {path: content for (at, path), content in hub.files.items() if at == revision}
        assert sent.keys() == wanted.keys()
        assert [name for name in wanted if content_of(name, sent[name]) != content_of(name, wanted[name])] == []
    first = json.loads(hub.files["step-000001", "export.json"])
    assert first["step"] == 1
    assert hub.files["step-000001", "adapter_model.safetensors"] != wanted["adapter_model.safetensors"]
    assert not any((pushing.folder / "push").iterdir())


def test_push_to_hub_uploads_the_same_files_as_save_pretrained(tmp_path, hub):
    made = retouch.Trainer.from_recipe(parse({**SMALL, "out": str(tmp_path)}), progress=False)
    made.train()
    made.push_to_hub(REPO)
    saved = {path.name for path in made.save_pretrained(tmp_path / "saved")}
    assert {path for _, path in hub.files} == saved
    hub.statuses["/api/repos/create"] = 403
    with pytest.raises(ValueError, match="repo someone/else: the Hugging Face Hub refused it"):
        made.push_to_hub("someone/else")


@pytest.mark.parametrize("part", ["/branch/", "/commit/"])
def test_a_failed_push_keeps_its_files_and_the_run_continues(tmp_path, hub, part):
    hub.statuses[part] = 403
    pushing = recipe(tmp_path)
    assert run(pushing, fresh=False) == 0
    kept = pushing.folder / "push" / "step-000002"
    assert f"hf upload {REPO} {kept} --revision step-000002" in log_text(pushing)
    assert (kept / "adapter_model.safetensors").is_file()
    assert not hub.files


def test_missing_write_access_to_the_hub_raises_before_the_first_step(tmp_path, hub):
    hub.statuses["/api/repos/create"] = 403
    with pytest.raises(ValueError, match=f"push.repo {REPO}: the Hugging Face Hub refused it"):
        run(recipe(tmp_path), fresh=False)
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_without_token_or_offline_nothing_is_pushed_and_the_log_reports_it(tmp_path, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    pushing = recipe(tmp_path)
    assert run(pushing, fresh=False) == 0
    assert "push is off: there is no token" in log_text(pushing)
    assert not hub.private
    [finding] = check_push(pushing)
    assert (finding.status, "nothing will be pushed" in finding.text) == ("note", True)
    monkeypatch.setattr(publishing, "HF_HUB_OFFLINE", True)
    assert why_not_pushable() == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"push": {"repo": "me/my/edits"}}, "push.repo"),
        ({"push": {"repo": REPO}, "sharding": "fsdp2"}, "push: with fsdp2 no rank has the whole weights"),
        ({"checkpoints": {"every": 2, "keep_every": 3}}, "checkpoints.keep_every"),
        ({"checkpoints": {"every": 0, "keep_every": 3}}, "checkpoints.keep_every"),
    ],
)
def test_invalid_push_settings_raise(change, says):
    with pytest.raises(ValueError, match=says):
        parse({**SMALL, **change})
