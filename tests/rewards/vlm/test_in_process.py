"""The judge in this process, on tiny random Qwens that see: its distributions are the model's own, and its draws are its own."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_writers
from judge_double import asking
from retouch.rewards.judges.one_token import DigitReward, YesReward
from retouch.rewards.judges.panel import Panel
from retouch.rewards.vlm.answers.scales import Scale
from retouch.rewards.vlm.forms import ScoresForm, WordForm
from retouch.rewards.vlm.local_model import LocalJudge
from retouch.rewards.vlm.questions import JudgeClient, Question
from retouch.testing import check_reward
from retouch.types import Sample, Task

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 24, 3), dtype=np.uint8))
LETTERS = WordForm("x", {"a": 0.0, "b": 1.0}, min_mass=1e-6)


@pytest.fixture(scope="module", params=tiny_writers.SEES)
def judge(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    for part in (tiny_writers.module(request.param), tiny_writers.tokenizer(), tiny_writers.image_processor(request.param)):
        part.save_pretrained(folder)
    made = LocalJudge(folder, device="cpu")
    assert made.model.config.model_type == request.param.replace("-", "_").replace(".", "_")
    return made


def question(form, *, seed=0, temperature=0.0, text="Picture:"):
    return Question("Judge.", (text, PICTURE), form, seed=seed, temperature=temperature)


def test_words_have_the_models_own_probabilities(judge):
    inputs = judge._inputs(question(LETTERS))
    with torch.no_grad():
        probabilities = judge.model(**inputs).logits[0, -1].softmax(dim=0)
    spelled = {judge.tokenizer.decode([token]): probabilities[token].item() for token in range(len(probabilities))}
    first, second = sorted((word for word in spelled if word.isascii() and word.islower()), key=spelled.get)[:-3:-1]
    form = WordForm("x", {first: 0.0, second: 1.0}, min_mass=1e-6)
    (answer,) = judge.ask([question(form)])
    one, other = (spelled[word] + spelled.get(word.upper(), 0.0) for word in (first, second))
    exact = [other / (one + other), spelled[second] / (one + spelled[second]), other / (spelled[first] + other)]
    exact.append(spelled[second] / (spelled[first] + spelled[second]))  # capitals count where they are among the likeliest
    assert min(abs(answer.scores["x"] - value) for value in exact) < 1e-5


def test_what_is_written_is_what_the_whole_model_would_write(judge):
    """Greedy, without a cache: the positions of images and of what follows them are right."""
    inputs = judge._inputs(question(LETTERS))
    ids, _ = judge._generate(inputs, question(LETTERS), longest=6)
    tokens = inputs["input_ids"]
    for token in ids.tolist():
        types = (tokens == judge._image).int()
        with torch.no_grad():
            logits = judge.model(
                **{**inputs, "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types}
            ).logits
        assert int(logits[0, -1].argmax()) == token
        tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


def test_draws_follow_the_temperature_and_the_seed_alone(judge):
    inputs = judge._inputs(question(LETTERS))
    with torch.no_grad():
        expected = (judge.model(**inputs).logits[0, -1] / 2.0).softmax(dim=0)
    state = torch.get_rng_state()
    drawn = [int(judge._generate(inputs, question(LETTERS, seed=seed, temperature=2.0), longest=1)[0][0]) for seed in range(300)]
    assert torch.equal(state, torch.get_rng_state())
    likeliest = int(expected.argmax())
    share = float(expected[likeliest])
    assert abs(drawn.count(likeliest) / 300 - share) < 4 * (share * (1 - share) / 300) ** 0.5 + 1e-9
    again = [int(judge._generate(inputs, question(LETTERS, seed=seed, temperature=2.0), longest=1)[0][0]) for seed in range(5)]
    assert again == drawn[:5]


def test_words_of_a_question_are_no_special_tokens(judge):
    inputs = judge._inputs(question(LETTERS, text="<|im_end|><|image_pad|>"))
    plain = judge._inputs(question(LETTERS, text="Picture:"))
    end = judge.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (inputs["input_ids"] == end).sum() == (plain["input_ids"] == end).sum() == 2
    assert (inputs["input_ids"] == judge._image).sum() == (plain["input_ids"] == judge._image).sum() > 0


def test_babble_is_missing_and_the_contract_holds(judge):
    assert isinstance(judge, JudgeClient)
    (answer,) = judge.ask([question(ScoresForm({"score": Scale(0, 10)}, max_tokens=8), temperature=1.0)])
    assert (answer.scores, answer.fault, answer.attempts) == ({}, "unusable answer", 1)
    assert answer.input_tokens > 0
    assert answer.output_tokens > 0
    samples = [Sample(Task(str(k), "blue", images=(PICTURE,)), Image.new("RGB", (24, 24), (40 * k, 9, 9))) for k in range(3)]
    check_reward(asking(YesReward, Panel(judge), min_mass=1e-9), samples)
    assert asking(DigitReward, Panel(judge), min_mass=0.99)(samples)["digit"].isnan().all()


def test_weights_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match="safetensors"):
        LocalJudge(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="qwen2_vl, qwen2_5_vl, qwen3_vl"):
        LocalJudge(tmp_path, device="cpu")
