"""The common prefix of the prompts of a group, in tokens of an in-process judge: a prefix cache computes it only once."""

import functools
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil

import tiny_models
import tiny_writers
from judge_double import on_panel
from pictures import picture
from retouch.types import Sample, Task
from retouch_judge.base import Panel
from retouch_judge.local_model import LocalJudge
from retouch_judge.questions import Answer
from retouch_judge.rewards import AspectsReward, ComplexEditReward, DigitReward, GroundReward, VieScore, YesReward

DOCS = Path(__file__).parents[3] / "docs"
INSTRUCTION = "Replace the sky by a clear evening sky with a few thin clouds, and keep the people on the bridge as they are."
EDITS = [AspectsReward, VieScore, ComplexEditReward, GroundReward, YesReward, DigitReward]
IMAGES = [functools.partial(AspectsReward, aspects=("quality", "alignment")), VieScore, YesReward]


class RecordsQuestions:
    """Records the questions and returns no scores."""

    identity = "listener"

    def __init__(self):
        self.questions = []

    def ask(self, questions):
        self.questions += questions
        return [Answer(fault="silent") for _ in questions]


def english():
    """Qwen's tokenizer class, with a vocabulary learned from this project's documentation."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learned.train(
        [str(page) for page in sorted(DOCS.glob("*.md"))],
        trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False),
    )
    pieces = json.loads(learned.to_str())["model"]
    made = Qwen2Tokenizer(
        vocab={**pieces["vocab"], "<|endoftext|>": len(pieces["vocab"])}, merges=[tuple(pair) for pair in pieces["merges"]]
    )
    made.add_special_tokens({"additional_special_tokens": list(tiny_models.SPECIAL)})
    return made


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    tiny_writers.module("qwen2.5-vl").save_pretrained(folder)
    english().save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=1280 * 28 * 28).save_pretrained(folder)
    return LocalJudge(folder, device="cpu")


def prompts(judge, make, *, size, source):
    """The prompts of a group of four as lists of tokens, by rubric; the tokens of an image are replaced by its pixels."""
    images = (picture(0, (size, size)),) if source else ()
    task = Task(
        "t",
        INSTRUCTION,
        images=images,
        target=picture(9, (size, size)),
        meta={"operations": ["replace the sky", "keep the people"]},
    )
    listener = RecordsQuestions()
    on_panel(make, Panel(listener))([Sample(task, picture(1 + slot, (size, size))) for slot in range(4)])
    pad = judge.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    groups = {}
    for question in listener.questions:
        shown = iter(part.tobytes() for part in question.parts if not isinstance(part, str))
        tokens = []
        for is_picture, run in itertools.groupby(
            judge._inputs([question])["input_ids"][0].tolist(), key=lambda token: token == pad
        ):
            name = next(shown) if is_picture else None
            tokens += [name if is_picture else token for token in run]
        groups.setdefault(question.rubric, []).append(tokens)
    return groups


def prefix_shares(tokens):
    """The common prefix of prompts as a share of all tokens, and as a share of the tokens without those of the last image."""
    common = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*tokens, strict=True)))
    last = [name for name in tokens[0] if isinstance(name, bytes)][-1]
    return common / len(tokens[0]), common / (len(tokens[0]) - tokens[0].count(last))


@pytest.mark.parametrize(("make", "source"), [*((make, True) for make in EDITS), *((make, False) for make in IMAGES)])
def test_prompts_of_a_group_share_at_least_80_percent_of_their_tokens(judge, make, source):
    for text, tokens in prompts(judge, make, size=112, source=source).items():
        assert len(tokens) == 4
        share, without_the_last = prefix_shares(tokens)
        assert share >= 0.8, text[:60]
        assert without_the_last >= 0.9, text[:60]
