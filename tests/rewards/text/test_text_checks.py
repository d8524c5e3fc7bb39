"""Checks of a completion: the think format, the sub-scores of a prompt, and the similarity of sentences."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, BertConfig, BertModel

import tiny_towers
from retouch.protocols import Reward
from retouch.types import Sample, Task
from retouch_rewards.completions import PromptQuality, SentenceSimilarityReward, prompt_quality, think_format


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think>b", 1),
        ("  <think>\nfirst\nsecond\n</think>\n\nanswer\n", 1),
        ("<think>a < b</think> c > d", 1),
        ("<think></think>b", 0),
        ("<think> \n</think>b", 0),
        ("<think>a</think>", 0),
        ("<think>a</think>  \n", 0),
        ("<think>a", 0),
        ("a</think>b", 0),
        ("a <think>b</think>c", 0),
        ("<think>a</think>b<think>c</think>d", 0),
        ("<think>a<think>b</think>c", 0),
        ("<think>a</think>b</think>c", 0),
        ("</think>a<think>b", 0),
        ("answer", 0),
        ("", 0),
    ],
)
def test_think_format_is_1_only_for_one_thought_before_an_answer(text, right):
    assert think_format(text) == right


def test_think_format_accepts_other_marks_and_rejects_invalid_ones():
    marks = {"opening": "<|start thinking|>", "closing": "<|end thinking|>"}
    assert think_format("<|start thinking|>a<|end thinking|>b", **marks) == 1
    assert think_format("<think>a</think>b", **marks) == 0
    for opening, closing in (("", "x"), ("x", ""), ("x", "x")):
        with pytest.raises(ValueError, match="marks"):
            think_format("a", opening=opening, closing=closing)


def test_each_sub_score_matches_values_computed_by_hand():
    assert prompt_quality("red cat", "red cat") == PromptQuality(0, 1, 0, 0, 0)
    assert prompt_quality("red cat", "red dog").keywords == 0.5
    assert prompt_quality("the red cat", "a RED Cat").keywords == 1
    assert prompt_quality("the", "it").keywords == 0  # if all words are fillers, each of them counts
    assert prompt_quality("cat", "cat one two three").details == pytest.approx(3 / 5)
    assert prompt_quality("cat", "cat 4k, 4K").quality_words == pytest.approx(1 / 3)
    assert prompt_quality("cat", "cat, highly detailed").quality_words == pytest.approx(1 / 3)
    assert prompt_quality("cat", "cat, high quality, sharp focus, detailed, 8k").quality_words == 1
    assert prompt_quality("cat", "cat 14km").quality_words == 0
    assert prompt_quality("cat", "a b c d e").sentence == 1
    assert prompt_quality("cat", "").total == 0
    assert prompt_quality("", "cat").keywords == 1
    assert prompt_quality("보라색 토끼", "보라색 토끼 아름다운").keywords == 1


@given(st.text(max_size=60), st.text(max_size=60))
def test_sub_scores_of_any_texts_stay_in_range(original, enhanced):
    points = prompt_quality(original, enhanced)
    assert all(0 <= point <= 1 for point in (points.length, points.keywords, points.details, points.quality_words, points.sentence))
    assert 0 <= points.total <= 5


LONGEST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = BertModel(BertConfig(**sizes, vocab_size=40, max_position_embeddings=64), add_pooling_layer=False)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.5)
    model.save_pretrained(path)
    tiny_towers.tokenizer(512, pad="<pad>").save_pretrained(path)
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    return path


def pooled_by(folder, path, **modes):
    """The same encoder with a pooling configuration of sentence-transformers."""
    (path / "1_Pooling").mkdir(parents=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    return path


def sample(prompt, completion):
    return Sample(Task("t", prompt), None, completion=completion)


def by_hand(folder, one, other, *, first=False):
    """The cosine of the states of each text alone, without padding."""
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = tiny_towers.tokenizer(512, pad="<pad>")
    vectors = []
    for text in (one, other):
        with torch.no_grad():
            states = model(input_ids=tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0]
        vectors.append(states[0] if first else states.mean(dim=0))
    return torch.cosine_similarity(*vectors, dim=0).item()


@pytest.mark.parametrize("first", [False, True])
def test_similarity_is_the_cosine_of_the_pooled_states(folder, tmp_path, first):
    path = pooled_by(folder, tmp_path / "x", pooling_mode_cls_token=first, pooling_mode_mean_tokens=not first)
    reward = SentenceSimilarityReward(path=str(path))
    assert isinstance(reward, Reward)
    pairs = [("red cat", "a red cat at night"), ("dog", "two dogs play chess"), ("sun", "sun")]
    scores = reward([sample(*pair) for pair in pairs])
    wanted = [max(by_hand(folder, *pair, first=first), 0.0) for pair in pairs]
    torch.testing.assert_close(scores["kept"], torch.tensor(wanted), atol=1e-5, rtol=0)
    assert scores["kept"][2].item() == pytest.approx(1.0, abs=1e-5)
    assert scores["kept"][:2].max() < 0.999


def test_only_the_prompt_in_a_completion_counts(folder):
    reward = SentenceSimilarityReward(path=str(folder))
    scores = reward([sample("red cat", "<think>dogs</think>Enhanced prompt: red cat"), sample("red cat", "<think>red cat")])
    assert scores["kept"].tolist() == [pytest.approx(1.0, abs=1e-5), 0.0]
    assert scores["truncated"][0] == 0
    assert scores["truncated"][1].isnan()


def test_truncated_text_is_reported_and_its_end_is_ignored(folder):
    reward = SentenceSimilarityReward(path=str(folder))
    fits = "a" * (LONGEST - 2)
    scores = reward([sample("red", fits), sample("red", fits + "xyz"), sample("red", fits + "uvw")])
    assert scores["truncated"].tolist() == [0, 1, 1]
    assert scores["kept"][1] == scores["kept"][2]


def test_an_unknown_pooling_is_refused(folder, tmp_path):
    path = pooled_by(folder, tmp_path / "x", pooling_mode_max_tokens=True)
    with pytest.raises(ValueError, match="pooled by pooling_mode_max_tokens"):
        SentenceSimilarityReward(path=str(path)).build()
