"""Checks of a completion: the think format, the sub-scores of a prompt, and the similarity of sentences."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, BertConfig, BertModel

import tiny_towers
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


@given(st.text(max_size=60), st.text(max_size=60))
def test_each_sub_score_matches_values_computed_by_hand_and_stays_in_range(original, enhanced):
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
    points = prompt_quality(original, enhanced)
    assert all(0 <= point <= 1 for point in (points.length, points.keywords, points.details, points.quality_words, points.sentence))
    assert 0 <= points.total <= 5


LONGEST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = BertModel(BertConfig(**tiny_towers.TOWER, vocab_size=40, max_position_embeddings=64), add_pooling_layer=False)
        tiny_towers.randomize(model, 0.5)
    model.save_pretrained(path)
    tiny_towers.tokenizer(512, pad="<pad>").save_pretrained(path)
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    return path


def kept(path, *pairs):
    return SentenceSimilarityReward(path=str(path))([Sample(Task("t", one), None, completion=other) for one, other in pairs])


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


def test_similarity_is_the_cosine_of_the_pooled_states(folder, tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    pairs = [("red cat", "a red cat at night"), ("dog", "two dogs play chess"), ("sun", "sun")]
    for mode in ("mean_tokens", "cls_token", "max_tokens"):  # as sentence-transformers writes it
        modes = {"word_embedding_dimension": 16, f"pooling_mode_{mode}": True}
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
        if mode == "max_tokens":
            with pytest.raises(ValueError, match="pooled by pooling_mode_max_tokens"):
                SentenceSimilarityReward(path=str(tmp_path)).build()
            continue
        scores = kept(tmp_path, *pairs)
        wanted = [max(by_hand(folder, *pair, first=mode == "cls_token"), 0.0) for pair in pairs]
        torch.testing.assert_close(scores["kept"], torch.tensor(wanted), atol=1e-5, rtol=0)
        assert scores["kept"][2].item() == pytest.approx(1.0, abs=1e-5)
        assert scores["kept"][:2].max() < 0.999


def test_only_the_prompt_in_a_completion_counts_and_truncated_text_is_reported(folder):
    scores = kept(folder, ("red cat", "<think>dogs</think>Enhanced prompt: red cat"), ("red cat", "<think>red cat"))
    assert scores["kept"].tolist() == [pytest.approx(1.0, abs=1e-5), 0.0]
    assert scores["truncated"][0] == 0
    assert scores["truncated"][1].isnan()
    fits = "a" * (LONGEST - 2)
    scores = kept(folder, ("red", fits), ("red", fits + "xyz"), ("red", fits + "uvw"))
    assert scores["truncated"].tolist() == [0, 1, 1]
    assert scores["kept"][1] == scores["kept"][2]
