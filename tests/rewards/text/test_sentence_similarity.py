"""Sentence similarity, with a tiny random BERT: the cosine of pooled states, and which part of a completion is compared."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

import tiny_towers
from retouch.protocols import Reward
from retouch.rewards.text.completions import SentenceSimilarityReward
from retouch.types import Sample, Task

LONGEST = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def pooled_by(folder: Path, path: Path, **modes: bool) -> Path:
    """The same encoder with a pooling configuration of sentence-transformers."""
    (path / "1_Pooling").mkdir(parents=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16, **modes}))
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    return path


def sample(prompt: str, completion: str) -> Sample:
    return Sample(Task("t", prompt), None, completion=completion)


def by_hand(folder: Path, one: str, other: str, *, first: bool = False) -> float:
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
def test_similarity_is_the_cosine_of_the_pooled_states(folder: Path, tmp_path: Path, first: bool) -> None:
    path = pooled_by(folder, tmp_path / "x", pooling_mode_cls_token=first, pooling_mode_mean_tokens=not first)
    reward = SentenceSimilarityReward(path=str(path))
    assert isinstance(reward, Reward)
    pairs = [("red cat", "a red cat at night"), ("dog", "two dogs play chess"), ("sun", "sun")]
    scores = reward([sample(*pair) for pair in pairs])
    wanted = [max(by_hand(folder, *pair, first=first), 0.0) for pair in pairs]
    torch.testing.assert_close(scores["kept"], torch.tensor(wanted), atol=1e-5, rtol=0)
    assert scores["kept"][2].item() == pytest.approx(1.0, abs=1e-5)
    assert scores["kept"][:2].max() < 0.999


def test_only_the_prompt_in_a_completion_counts(folder: Path) -> None:
    reward = SentenceSimilarityReward(path=str(folder))
    scores = reward([sample("red cat", "<think>dogs</think>Enhanced prompt: red cat"), sample("red cat", "<think>red cat")])
    assert scores["kept"].tolist() == [pytest.approx(1.0, abs=1e-5), 0.0]
    assert scores["truncated"][0] == 0
    assert scores["truncated"][1].isnan()


def test_truncated_text_is_reported_and_its_end_is_ignored(folder: Path) -> None:
    reward = SentenceSimilarityReward(path=str(folder))
    fits = "a" * (LONGEST - 2)
    scores = reward([sample("red", fits), sample("red", fits + "xyz"), sample("red", fits + "uvw")])
    assert scores["truncated"].tolist() == [0, 1, 1]
    assert scores["kept"][1] == scores["kept"][2]


def test_an_unknown_pooling_is_refused(folder: Path, tmp_path: Path) -> None:
    path = pooled_by(folder, tmp_path / "x", pooling_mode_max_tokens=True)
    with pytest.raises(ValueError, match="pooled by pooling_mode_max_tokens"):
        SentenceSimilarityReward(path=str(path)).build()
