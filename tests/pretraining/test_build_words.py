"""Building the model that renders words: the same bits from the same seed, in the layout that diffusers loads."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from retouch.models.flux.model import FluxFill
from retouch.records.files import read_json
from retouch.rewards.text.ocr import OcrReward
from retouch_worlds.data import WordData
from retouch_worlds.models.family import PlaygroundWords
from retouch_worlds.models.tiny_fill import text
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining import words as building
from retouch_worlds.pretraining.words import WordAutoencoderTraining, WordRound, WordTraining, build_words
from small_builds import build_three

TINY = {
    "autoencoder": WordAutoencoderTraining(steps=2, batch=2),
    "words": WordTraining(rounds=(WordRound(steps=2, learning_rate=1e-3, wrong_letters=0.4),), batch=4, warmup=1),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two builds of one seed, and one of another."""
    folder = tmp_path_factory.mktemp("built")
    for scores in build_three(folder, partial(build_words, **TINY), measured_by=building):
        assert 0 <= scores["all correctness"] <= 1
    return folder


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(built: Path) -> None:
    parts = sorted(path.relative_to(built / "one") for path in (built / "one").rglob("*.safetensors"))
    assert {part.parts[0] for part in parts} == {"transformer", "vae", "text_encoder", "text_encoder_2"}
    for part in parts:
        assert (built / "one" / part).read_bytes() == (built / "two" / part).read_bytes()
        assert (built / "one" / part).read_bytes() != (built / "other" / part).read_bytes()


@pytest.mark.slow
def test_build_json_contains_the_command_and_no_local_path(built: Path) -> None:
    told = read_json(built / "one" / "build.json")
    assert told["command"] == "retouch playground build --words --seed 3"
    for file in (built / "one").rglob("*.json"):
        assert str(built) not in file.read_text()


@torch.no_grad()
def test_the_built_words_model_loads_as_a_flux_fill_model(built: Path) -> None:
    folder, cpu = built / "one", torch.device("cpu")
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


def test_a_folder_without_a_model_of_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="playground build --words"):
        PlaygroundWords(path=str(tmp_path)).build(device=torch.device("cpu"))


@pytest.mark.slow
def test_the_packaged_weights_have_the_scores_in_build_json() -> None:
    told = read_json(playground_weights("words") / "build.json")["held_out"]
    model: Any = PlaygroundWords().build(device=torch.device("cpu"))
    found = building.measure(model, OcrReward(where="box", line_width=160))
    assert found.keys() == told.keys()
    assert max(abs(found[name] - told[name]) for name in told) <= 0.05
    assert found["ceiling correctness"] >= 0.97


def test_the_packaged_weights_have_at_most_4_mb() -> None:
    assert sum(file.stat().st_size for file in playground_weights("words").rglob("*") if file.is_file()) <= 4_000_000


def test_every_instruction_fits_the_text_encoder() -> None:
    encoder = text()
    for task in WordData(seed=0, count=100).tasks()[:]:
        encoder.check(task.instruction, task.id)
