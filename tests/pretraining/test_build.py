"""Building the playground's base models: the same bits from the same seed, in the layout that loading expects."""

import json
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from diffusers import QwenImagePipeline

from retouch.records.files import read_json
from retouch_models.flux.model import FluxFill
from retouch_rewards.ocr import OcrReward
from retouch_worlds.data import PlaygroundData, TextToImageData, WordData
from retouch_worlds.models import language
from retouch_worlds.models.family import PlaygroundModel, PlaygroundTextToImage, PlaygroundWords
from retouch_worlds.models.language import PlaygroundEmu3, PlaygroundEnhancer
from retouch_worlds.models.tiny_fill import text
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining import editor as qwen_parts
from retouch_worlds.pretraining import emu3 as build_module
from retouch_worlds.pretraining import text_to_image, words, writer
from retouch_worlds.pretraining.editor import (
    SPECIAL_TOKENS,
    AutoencoderTraining,
    EditorRound,
    EditorTraining,
    build_editor,
    build_large_editor,
    deepened,
    measure,
)
from retouch_worlds.pretraining.emu3 import CodesTraining, Emu3Training, build_emu3
from retouch_worlds.pretraining.text_to_image import EnhancerTraining, TextToImageTraining, build_text_to_image, described
from retouch_worlds.pretraining.text_to_image import measure as measure_build_text_to_image
from retouch_worlds.pretraining.words import WordAutoencoderTraining, WordRound, WordTraining, build_words
from retouch_worlds.pretraining.writer import WriterRound, WriterTraining, build_writer

# Building the playground's base models

TINY = {
    "autoencoder": AutoencoderTraining(steps=3, decoder_steps=2, batch=8),
    "editor": EditorTraining(
        rounds=(EditorRound(steps=2, learning_rate=2e-3), EditorRound(steps=1, learning_rate=1e-3, impossible=0.5)),
        batch=8,
        warmup=1,
    ),
}


def load(path: Path):
    return PlaygroundModel(path=str(path)).build(device=torch.device("cpu"))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch_worlds.pretraining.editor.HELD_OUT", 8)
    for name in ("one", "two"):
        build_editor(tmp_path / name, seed=3, **TINY)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert load(tmp_path / "one").module.config.num_layers == 4


def test_a_deepened_editor_equals_the_original_before_training() -> None:
    small = load(playground_weights())
    large = deepened(load(playground_weights()), 3, seed=0)
    assert len(large.module.transformer_blocks) == 12
    tasks = PlaygroundData(seed=3, count=2, complexity=[1]).tasks(in_turn=True)[:2]
    velocities = []
    for model in (small, large):
        conditioning = model.encode(tasks)
        x = model.initial_noise(conditioning, [torch.Generator().manual_seed(row) for row in range(2)])
        with torch.no_grad():
            velocities.append(model.velocity(model.module, x, torch.tensor([0.9, 0.3]), conditioning))
    assert torch.equal(*velocities)  # the new blocks add 0


@pytest.mark.slow
def test_the_large_editor_is_built_and_its_new_blocks_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retouch_worlds.pretraining.editor.HELD_OUT", 8)
    rounds = (EditorRound(steps=2, learning_rate=1e-3),)
    build_large_editor(tmp_path, seed=0, editor=EditorTraining(rounds=rounds, batch=4, warmup=1, average_decay=0.5))
    built = load(tmp_path)
    assert built.module.config.num_layers == 4 * load(playground_weights()).module.config.num_layers
    assert all(block.img_mod[-1].weight.abs().max() > 0 for block in built.module.transformer_blocks)


def test_the_tokenizer_has_the_special_tokens_and_round_trips_unusual_text() -> None:
    words = qwen_parts.tokenizer(0)
    for token in SPECIAL_TOKENS:
        assert words.tokenize(f"a{token}b").count(token) == 1
    strange = "żółw 龟 <|im_start|>user\n🐢"
    assert words.decode(words(strange)["input_ids"]) == strange
    assert words.tokenize("make the red circle blue") == ["make", "Ġthe", "Ġred", "Ġcircle", "Ġblue"]


def scores_of(*names: str) -> dict[str, float]:
    """The scores that were stored when these weights were built."""
    scores: dict[str, float] = read_json(playground_weights(*names) / "build.json")["held_out"]
    return scores


def measured(name: str) -> dict[str, float]:
    cpu = torch.device("cpu")
    if name == "words":
        found = words.measure(cast(Any, PlaygroundWords().build(device=cpu)), OcrReward(where="box", line_width=160))
        assert found["ceiling correctness"] >= 0.97
        return found
    if name == "text_to_image":
        writer: Any = PlaygroundEnhancer().build(device=cpu, gradient_checkpointing=False)
        assert scores_of("enhancer") == scores_of(name)
        return measure_build_text_to_image(cast(Any, PlaygroundTextToImage().build(device=cpu)), writer)
    return measure(load(playground_weights()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("", 0.1), ("text_to_image", 0.1), ("words", 0.05)])
def test_the_packaged_weights_have_the_scores_in_build_json(name: str, tolerance: float) -> None:
    kept, found = scores_of(*([name] if name else [])), measured(name)
    assert found.keys() == kept.keys()
    assert max(abs(found[each] - kept[each]) for each in kept) <= tolerance


def test_the_text_encoder_attends_at_most_6_tokens_back() -> None:
    """Two layers with a window of 4 tokens reach 6 back, whatever the library warns of."""
    encoder = qwen_parts.text_encoder(qwen_parts.tokenizer(0)).eval()
    tokens = torch.arange(100, 140)[None]
    changed = tokens.clone()
    changed[0, 5] = 300
    with torch.no_grad():
        one, other = (encoder.model(input_ids=ids, use_cache=False).last_hidden_state for ids in (tokens, changed))
    differing = (one - other).abs().amax(dim=-1)[0].gt(1e-6).nonzero().flatten().tolist()
    assert differing == list(range(5, 12))


# A small `retouch tools playground --emu3` writes files that a recipe can load

CODES = CodesTraining(steps=3, free_steps=2, batch=4)
STARTS = {
    "s": Emu3Training(complexity={1: 1.0}, rounds=(2,), batch=2),
    "sc": Emu3Training(complexity={1: 0.5, 2: 0.5}, rounds=(1, 1), batch=2),
}
FURTHER = {
    "s-distractors": ("s", Emu3Training(complexity={1: 1.0}, rounds=(1,), before=1, batch=2, impossible=1.0)),
    "sc-unfinished": ("sc", Emu3Training(complexity={2: 1.0}, rounds=(1,), before=2, batch=2, unfinished=1.0)),
}
ALL = (*STARTS, *FURTHER)


def build(path):
    """A few steps of training, and a few tasks to measure."""
    with patch.object(build_module, "HELD_OUT", 6):
        return build_emu3(path, seed=3, codes=CODES, starts=STARTS, further=FURTHER)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "emu3"
    return path, build(path)


@pytest.mark.slow
def test_every_start_can_be_loaded_from_the_build_folder(built, monkeypatch):
    path, scores = built
    told = json.loads((path / "build.json").read_text())
    assert told["command"] == "retouch tools playground --emu3 --seed 3"
    assert told["held_out"] == scores
    assert {name for name in scores if "ceiling" in name} == {
        f"{start}, ceiling {what}" for start in ALL for what in ("overall", "exact")
    }
    monkeypatch.setattr(language, "playground_weights", lambda name: path)
    heads = []
    for start in ALL:
        section = PlaygroundEmu3(start=start)
        editor = section.build(device=torch.device("cpu"), gradient_checkpointing=False)
        assert editor.grid == (3, 3)
        heads.append(editor.module.lm_head.weight)
    assert all(not torch.equal(a, b) for a, b in combinations(heads, 2))


@pytest.mark.slow
def test_the_same_seed_makes_the_same_weights(built, tmp_path):
    path, _ = built
    build(tmp_path)
    for part in ("autoencoder", *ALL):
        assert (tmp_path / part / "model.safetensors").read_bytes() == (path / part / "model.safetensors").read_bytes()


def test_the_packaged_weights_score_well_on_single_edits_and_contain_no_local_path():
    shipped = playground_weights("emu3")
    scores = json.loads((shipped / "build.json").read_text())["held_out"]
    assert min(scores["s, ceiling overall"], scores["sc, ceiling overall"]) >= 9
    assert min(scores["s, complexity=1 overall"], scores["sc, complexity=1 overall"]) >= 7
    assert min(scores[f"s-distractors, complexity={number} overall"] for number in (1, 2)) >= 7
    for config in shipped.rglob("*.json"):
        assert "/tmp/" not in config.read_text()
        assert "_name_or_path" not in json.loads(config.read_text())


def test_distractors_are_requests_that_the_target_ignores():
    """A demonstration of the base editor `s-distractors` has one edit, and most instructions have more clauses than that."""
    start, settings = build_module.FURTHER["s-distractors"]
    assert start == "s"
    assert set(settings.complexity) == {1}
    data = PlaygroundData(seed=0, count=40, complexity={1: 1.0}, filler=settings.filler, impossible=settings.impossible)
    plain = PlaygroundData(seed=0, count=40, complexity={1: 1.0}, filler=settings.filler)
    pairs = [*zip(data.tasks(), plain.tasks(), strict=True)]
    assert all(len(task.meta["edits"]) == 1 for task, _ in pairs)
    assert sum(len(task.instruction) > len(without.instruction) for task, without in pairs) >= 10


# The text-to-image model, the model of words, and the writer

SMALL_BUILDS: dict[str, tuple[Any, Any, tuple[float, float]]] = {
    "text-to-image": (
        partial(
            build_text_to_image,
            text_to_image=TextToImageTraining(steps=2, batch=4, warmup=1),
            enhancer=EnhancerTraining(steps=2, batch=4, warmup=1),
        ),
        text_to_image,
        (0, 10),
    ),
    "words": (
        partial(
            build_words,
            autoencoder=WordAutoencoderTraining(steps=2, batch=2),
            words=WordTraining(rounds=(WordRound(steps=2, learning_rate=1e-3, wrong_letters=0.4),), batch=4, warmup=1),
        ),
        words,
        (0, 1),
    ),
    "writer": (
        partial(
            build_writer,
            writer=WriterTraining(
                rounds=(WriterRound(2, 2e-3, (1,)), WriterRound(2, 1e-3, (1, 2), distillation=1.0)), batch=4, warmup=1
            ),
        ),
        writer,
        (0, 10),
    ),
}


def build_small(name: str, folder: Path, seed: int = 3) -> Path:
    """A build whose scores are those of 4 held-out tasks."""
    make, measured_by, (least, most) = SMALL_BUILDS[name]
    with pytest.MonkeyPatch.context() as change, torch.enable_grad():
        change.setattr(measured_by, "HELD_OUT", 4)
        change.setattr(measured_by, "EVAL_STEPS", 1)
        before = torch.get_num_threads()
        scores = make(folder, seed=seed)
        assert torch.get_num_threads() == before
    assert all(least <= score <= most for score in scores.values())
    return folder


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: build_small(name, tmp_path_factory.mktemp("built") / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_BUILDS)
def test_the_same_seed_gives_the_same_bits_and_json_files_without_a_local_path(
    first: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    one, again, other = first(name), build_small(name, tmp_path / "again"), build_small(name, tmp_path / "other", seed=4)
    parts = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert len(parts) == {"text-to-image": 4, "words": 4, "writer": 1}[name]
    for part in parts:
        assert (one / part).read_bytes() == (again / part).read_bytes()
        if (name, part.parts[-2:-1]) != ("text-to-image", ("vae",)):
            assert (one / part).read_bytes() != (other / part).read_bytes()
    for file in one.rglob("*.json"):
        assert "/weights/" not in file.read_text()
        assert str(one) not in file.read_text()
    if name == "words":
        assert read_json(one / "build.json")["command"] == "retouch tools playground --words --seed 3"


@torch.no_grad()
def test_the_diffusers_pipeline_gives_the_same_latents(first: Callable[[str], Path]) -> None:
    folder = first("text-to-image") / "text_to_image"
    model = PlaygroundTextToImage(path=str(folder)).build(device=torch.device("cpu"))
    pipeline = QwenImagePipeline.from_pretrained(folder, local_files_only=True).to(torch.float32)
    task = described(TextToImageData(seed=0, count=1, complexity=[3], split="test").tasks(in_turn=True)[0])
    ours = model.encode([task])
    pipeline.prompt_template_encode = model.text.template.head + "{}" + model.text.template.tail
    pipeline.prompt_template_encode_start_idx = model.text.prefix
    embeds, mask = pipeline.encode_prompt(task.instruction)
    assert torch.equal(embeds, ours.tensors["embeds"])
    assert mask is None or torch.equal(mask.bool(), ours.tensors["mask"])
    x = model.initial_noise(ours, [torch.Generator().manual_seed(0)])
    sigmas = model.sigmas(4, ours)
    for k in range(4):
        x = x + (sigmas[k + 1] - sigmas[k]) * model.velocity(model.module, x, sigmas[k][None], ours)
    drawn = pipeline(
        prompt_embeds=embeds, prompt_embeds_mask=ours.tensors["mask"].long(), height=24, width=24, num_inference_steps=4,
        true_cfg_scale=1.0, generator=torch.Generator().manual_seed(0), output_type="latent",
    ).images  # fmt: skip
    torch.testing.assert_close(drawn, x, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_the_built_words_model_loads_as_a_flux_fill_model(first: Callable[[str], Path]) -> None:
    folder, cpu = first("words"), torch.device("cpu")
    model: Any = PlaygroundWords(path=str(folder)).build(device=cpu)
    assert isinstance(model, FluxFill)
    task = WordData(seed=0, count=1, split="test").tasks()[0]
    known = model.encode([task])
    x = model.initial_noise(known, [torch.Generator().manual_seed(0)])
    velocity = model.velocity(model.module, x, torch.tensor([0.9]), known)
    assert velocity.shape == (1, 32, 32)
    assert velocity.isfinite().all()
    assert model.text.t5_tokenizer.tokenize(task.instruction)[3:-2] == ["▁'", *task.text]
    assert model.decode(x, known)[0].size == (64, 32)


def test_the_packaged_weights_are_small_and_a_folder_without_them_raises(tmp_path: Path) -> None:
    for names, megabytes in (([""], 12), (["text_to_image", "enhancer"], 8), (["words"], 4)):
        folders = [playground_weights(name) if name else playground_weights() for name in names]
        assert sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file()) <= megabytes * 10**6
    sections: tuple[tuple[Any, str], ...] = ((PlaygroundTextToImage, "--text-to-image"), (PlaygroundWords, "--words"))
    for section, option in sections:
        with pytest.raises(ValueError, match=f"tools playground {option}"):
            section(path=str(tmp_path)).build(device=torch.device("cpu"))


def test_every_instruction_fits_the_text_encoder() -> None:
    encoder = text()
    for task in WordData(seed=0, count=100).tasks()[:]:
        encoder.check(task.instruction, task.id)
