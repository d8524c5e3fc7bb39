"""The in-process judge on tiny random Qwen-VL models: it uses the model's probabilities and a random generator of its own."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tiny_writers
from judge_double import on_panel
from retouch.models.quantized import is_quantized
from retouch.types import Sample, Task
from retouch_judge.base import Panel
from retouch_judge.local_model import LocalJudge
from retouch_judge.questions import JudgeClient, Question, ScoresForm, WordForm
from retouch_judge.rewards import DigitReward, YesReward
from retouch_judge.wording import Scale
from retouch_worlds.testing import check_reward

PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 24, 3), dtype=np.uint8))
LETTERS = WordForm("x", {"a": 0.0, "b": 1.0}, min_mass=1e-6)
SCORES = ScoresForm({"score": Scale(0, 10)}, max_tokens=8)


@pytest.fixture(scope="module", params=tiny_writers.VISION_KINDS)
def judge(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    for part in (tiny_writers.module(request.param), tiny_writers.tokenizer(), tiny_writers.image_processor(request.param)):
        part.save_pretrained(folder)
    made = LocalJudge(folder, device="cpu")
    assert made.model.config.model_type == request.param.replace("-", "_").replace(".", "_")
    return made


def question(form, *, seed=0, temperature=0.0, text="Picture:"):
    return Question("Judge.", (text, PICTURE), form, seed=seed, temperature=temperature)


def test_word_scores_use_the_probabilities_of_the_model(judge):
    inputs = judge._inputs([question(LETTERS)])
    with torch.no_grad():
        probabilities = judge.model(**inputs).logits[0, -1].softmax(dim=0)
    spelled = {judge.tokenizer.decode([token]): probabilities[token].item() for token in range(len(probabilities))}
    first, second = sorted((word for word in spelled if word.isascii() and word.islower()), key=spelled.get)[:-3:-1]
    form = WordForm("x", {first: 0.0, second: 1.0}, min_mass=1e-6)
    (answer,) = judge.ask([question(form)])
    one, other = (spelled[word] + spelled.get(word.upper(), 0.0) for word in (first, second))
    exact = [other / (one + other), spelled[second] / (one + spelled[second]), other / (spelled[first] + other)]
    exact.append(spelled[second] / (spelled[first] + spelled[second]))  # capitals count if among the likeliest tokens
    assert min(abs(answer.scores["x"] - value) for value in exact) < 1e-5


def test_improbable_tokens_with_the_same_text_raise_no_error(judge, monkeypatch):
    monkeypatch.setattr(judge, "tokenizer", SimpleNamespace(decode=lambda ids: "a" if ids == [0] else "b"))
    found = judge._first(torch.tensor([0.0, -900.0, -900.0]))
    assert found == {"a": 0.0, "b": pytest.approx(-900 + math.log(2))}


def test_generation_matches_greedy_decoding_without_a_cache(judge):
    """This checks the positions of image tokens and of the tokens after them."""
    inputs = judge._inputs([question(LETTERS)])
    (ids,), _ = judge._generate(inputs, [question(LETTERS)], longest=6)
    tokens = inputs["input_ids"]
    for token in ids.tolist():
        types = (tokens == judge._image).int()
        with torch.no_grad():
            logits = judge.model(
                **{**inputs, "input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types}
            ).logits
        assert int(logits[0, -1].argmax()) == token
        tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


@pytest.mark.slow
def test_sampling_follows_the_temperature_and_depends_only_on_the_seed(judge):
    inputs = judge._inputs([question(LETTERS)])
    with torch.no_grad():
        expected = (judge.model(**inputs).logits[0, -1] / 2.0).softmax(dim=0)
    state = torch.get_rng_state()
    drawn = [int(judge._generate(inputs, [question(LETTERS, seed=seed, temperature=2.0)], longest=1)[0][0]) for seed in range(300)]
    assert torch.equal(state, torch.get_rng_state())
    likeliest = int(expected.argmax())
    share = float(expected[likeliest])
    assert abs(drawn.count(likeliest) / 300 - share) < 4 * (share * (1 - share) / 300) ** 0.5 + 1e-9
    again = [int(judge._generate(inputs, [question(LETTERS, seed=seed, temperature=2.0)], longest=1)[0][0]) for seed in range(5)]
    assert again == drawn[:5]


def test_special_tokens_in_the_text_of_a_question_are_encoded_as_text(judge):
    inputs = judge._inputs([question(LETTERS, text="<|im_end|><|image_pad|>")])
    plain = judge._inputs([question(LETTERS, text="Picture:")])
    end = judge.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (inputs["input_ids"] == end).sum() == (plain["input_ids"] == end).sum() == 2
    assert (inputs["input_ids"] == judge._image).sum() == (plain["input_ids"] == judge._image).sum() > 0


def test_a_quantised_judge_answers_nearly_as_the_whole_one_and_has_another_identity(judge, tmp_path):
    pytest.importorskip("torchao")
    for part in (judge.model, judge.tokenizer, judge.processor):
        part.save_pretrained(tmp_path)
    small = LocalJudge(tmp_path, device="cpu", bits="8bit")
    assert any(is_quantized(weight) for weight in small.model.parameters())
    answers = [each.ask([question(LETTERS)])[0].scores["x"] for each in (judge, small)]
    assert answers[0] == pytest.approx(answers[1], abs=0.05)
    assert small.identity.endswith("torch.float32, 8bit")


def test_absent_or_unsupported_weights_raise(tmp_path):
    with pytest.raises(ValueError, match="safetensors"):
        LocalJudge(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="qwen2_vl, qwen2_5_vl, qwen3_vl"):
        LocalJudge(tmp_path, device="cpu")


# Several questions at once


@pytest.fixture(scope="module")
def several():
    """Questions of several lengths, with images of several sizes, some sampled and some greedy, in two forms."""
    rng = np.random.default_rng(3)
    images = [Image.fromarray(rng.integers(0, 256, (24 + 16 * (k % 3), 32, 3), dtype=np.uint8)) for k in range(7)]
    return [
        Question("Judge.", ("Picture: " + "word " * k, image), (LETTERS, LETTERS, SCORES)[k % 3], seed=k, temperature=0.9 * (k % 2))
        for k, image in enumerate(images)
    ]


def test_batched_questions_get_the_same_answers_as_single_questions(judge, several, monkeypatch):
    assert isinstance(judge, JudgeClient)
    alone = judge.ask(several)
    calls = []
    generate = judge.model.generate
    monkeypatch.setattr(judge.model, "generate", lambda **given: calls.append(len(given["input_ids"])) or generate(**given))
    monkeypatch.setattr(judge, "batch", 4)
    together = judge.ask(several)
    assert calls == [4, 1, 2]
    for one, other in zip(alone, together, strict=True):
        assert (one.text, one.fault, one.seed, one.temperature) == (other.text, other.fault, other.seed, other.temperature)
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert other.scores == pytest.approx(dict(one.scores), abs=1e-5)
    assert any(answer.scores for answer in together)
    assert judge.ask(several[::-1])[::-1][0].text == together[0].text
    (answer,) = judge.ask([question(SCORES, temperature=1.0)])
    assert (answer.scores, answer.fault, answer.attempts) == ({}, "unusable answer", 1)
    assert min(answer.input_tokens, answer.output_tokens) > 0
    # Output tokens are counted up to the end token of each row; the rows of a batch go on until the last one ends.
    asked = [question(SCORES, seed=seed) for seed in range(2)]
    rows = torch.tensor([[5, judge._end, judge._end], [5, 6, judge._end]])
    sequences = torch.cat([judge._inputs(asked)["input_ids"], rows], dim=1)
    made = SimpleNamespace(sequences=sequences, logits=(torch.zeros(2, 8),))
    monkeypatch.setattr(judge.model, "generate", lambda **_: made)
    assert [answer.output_tokens for answer in judge.ask(asked)] == [2, 3]


def test_judges_in_this_process_pass_the_contract_checks(judge):
    samples = [Sample(Task(str(k), "blue", images=(PICTURE,)), Image.new("RGB", (24, 24), (40 * k, 9, 9))) for k in range(3)]
    check_reward(on_panel(YesReward, Panel(judge), min_mass=1e-9), samples)
    assert on_panel(DigitReward, Panel(judge), min_mass=0.99)(samples)["digit"].isnan().all()


def test_sampling_does_not_depend_on_the_other_rows(judge):
    """With the same logits, the tokens that are drawn are the same."""
    from retouch_judge.local_model import _Gumbel

    asked = [question(LETTERS, seed=seed, temperature=temperature) for seed, temperature in ((1, 0.7), (2, 0.0), (3, 2.0))]
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(3, 1, dtype=torch.long)
    together, alone = _Gumbel(asked), [_Gumbel([each]) for each in asked]
    for _ in range(3):
        drawn = together(ids, logits)
        assert torch.equal(drawn, torch.cat([each(ids[:1], row) for each, row in zip(alone, logits.split(1), strict=True)]))
        assert torch.equal(drawn[1], logits[1])
