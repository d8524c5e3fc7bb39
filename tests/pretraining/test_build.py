"""Building the playground's base models: the same bits from the same seed, in the layout that loading expects."""

from pathlib import Path

import pytest
import torch

from retouch.records.files import read_json
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining import editor as qwen_parts
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


@pytest.mark.slow
def test_the_packaged_weights_have_the_scores_in_build_json() -> None:
    kept = read_json(playground_weights() / "build.json")["held_out"]
    found = measure(load(playground_weights()))
    assert found.keys() == kept.keys()
    assert max(abs(found[name] - kept[name]) for name in kept) <= 0.1


def test_the_packaged_weights_have_at_most_12_mb() -> None:
    size = sum(file.stat().st_size for file in playground_weights().rglob("*") if file.is_file())
    assert size <= 12_000_000


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
