"""Emu3 as an image editor: its prompts, its images as codes, and the format of its completions."""

import dataclasses

import numpy as np
import pytest
import torch

import tiny_emu3
import tiny_models
import tiny_writing
from retouch.models.emu3 import BOI, BOS, DRAW, END_OF_THOUGHT, EOF, EOI, EOL, EOS, IMG, THINK, Emu3Editor
from retouch.protocols import AutoregressiveModel, Grammar
from retouch.renderers.base import CodesDecoder, DecodesCodes
from retouch.types import Completion, Kind, Needs, Task
from retouch_worlds.testing import check_policy
from slow_params import slow_except


def tasks():
    return (
        tiny_models.task("one", "make it red", tiny_models.image(0, 16, 24)),
        tiny_models.task("two", "no", tiny_models.image(1, 32, 32)),
        tiny_models.task("three", "add a blue circle", tiny_models.image(2, 16, 24)),
    )


@pytest.fixture(scope="module")
def editor():
    made = tiny_emu3.editor()
    factor = made.vq.spatial_scale_factor
    assert made.grid == (16 // factor, 24 // factor)
    return made


def names(editor, ids):
    return editor.words.tokenizer.convert_ids_to_tokens(list(ids))


def test_prompt_consists_of_source_image_instruction_and_prefill(editor):
    prompts = editor.encode(tasks())
    height, width = editor.grid
    row = prompts.ids[0][prompts.mask[0]].tolist()
    codes = editor.encode_codes([tasks()[0].images[0]])[0]
    rows = [[f"<|visual token {code:06d}|>" for code in line] + [EOL] for line in codes.tolist()]
    expected = [BOS, BOI, *f"{height}*{width}", IMG, *(each for line in rows for each in line), EOF, EOI]
    assert names(editor, row[: len(expected)]) == expected
    assert editor.words.tokenizer.decode(row[len(expected) :]) == "make it red" + DRAW
    assert isinstance(editor, AutoregressiveModel)
    assert isinstance(editor.grammar, Grammar)


def test_codes_and_decoded_images_match_the_autoencoder(editor):
    picture = tiny_models.image(3, 16, 24)
    pixels = torch.from_numpy(np.array(picture)).float().permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        expected = editor.vq.encode(pixels, torch.tensor([[16, 24]]), return_dict=True).image_tokens[0]
        again = editor.vq.decode(expected[None])[0]
    codes = editor.encode_codes([picture, tiny_models.image(4, 16, 24)])
    assert torch.equal(codes[0], expected)
    shown = editor.decode_codes(codes[:1])[0]
    assert shown.size == (24, 16)
    seen = torch.from_numpy(np.array(shown)).float().permute(2, 0, 1)
    assert (seen - (again.clamp(-1, 1) + 1) * 127.5).abs().max() <= 0.51


def test_image_token_ids_convert_back_to_codes_and_malformed_ids_give_none(editor):
    codes = editor.encode_codes([tiny_models.image(5, 16, 24)])[0]
    ids = editor.words.image_ids(codes)[1:]  # boi is the prefill
    assert torch.equal(editor.codes_in(ids), codes)
    place = ids.index(editor.words.img) + 1
    assert editor.codes_in(ids[: place + 3]) is None
    assert editor.codes_in([*ids[:place], editor.words.eol, *ids[place + 1 :]]) is None
    assert editor.codes_in([*ids, editor.words.img]) is None
    assert editor.codes_in(editor.words.text_ids("no picture")) is None


def test_target_ids_and_demonstrations_contain_the_target_image(editor):
    target = tiny_models.image(7, 16, 24)
    task = dataclasses.replace(tasks()[0], target=target)
    codes = editor.encode_codes([target])[0]
    (drawn,) = editor.target_ids([task])
    assert torch.equal(editor.codes_in(drawn), codes)
    batch = tiny_writing.batch((task,), group_size=2)
    shown = tiny_writing.policy(writer=editor, sampling={"max_new_tokens": len(drawn) + 1}).demonstrate(batch)
    assert [list(written.ids) for written in shown.outputs] == [drawn] * 2
    assert shown.mask.sum(1).tolist() == [codes.numel()] * 2
    with pytest.raises(ValueError, match="no target image"):
        editor.target_ids(tasks()[:1])


def test_target_ids_contain_the_thought_before_the_image():
    made = tiny_emu3.editor(prefill=THINK)
    task = dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24))
    with pytest.raises(ValueError, match="'thought'"):
        made.target_ids([task])
    (drawn,) = made.target_ids([dataclasses.replace(task, meta={"thought": "hm"})])
    told = made.words.tokenizer.decode(drawn[: drawn.index(made.words.img)])
    assert told == f"hm{END_OF_THOUGHT}{BOI}{made.grid[0]}*{made.grid[1]}"
    assert made.codes_in(drawn) is not None
    assert made.codes_in(drawn[:-6]) is None


@pytest.mark.parametrize("prefill", [DRAW, THINK])
def test_text_of_a_completion_has_no_size_of_its_image(prefill):
    made = tiny_emu3.editor(prefill=prefill)
    meta = {"thought": "3*3 circles, so 2*3"}
    (drawn,) = made.target_ids([dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24), meta=meta)])
    thought = meta["thought"] if prefill == THINK else ""
    assert made.decode(drawn) == thought
    cut = drawn.index(made.words.img) - 1  # the last digit of the size is missing
    assert made.decode(drawn[:cut]) == thought
    assert made.decode([made.words.boi, *made.words.text_ids("no picture")]) == "no picture"


@pytest.mark.parametrize(
    ("prefill", "train"),
    [(DRAW, "lora"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((DRAW, "full"), (THINK, "lora")))],
)
@pytest.mark.parametrize(
    "sampling", slow_except([{"temperature": 0.7, "top_p": 0.9}], [{}, {"temperature": 0.7, "top_p": 0.9}]), ids=str
)
def test_policy_passes_the_contract_checks(prefill, train, sampling):
    made = tiny_emu3.editor(prefill=prefill, train=train)
    height, width = made.grid
    longest = len(made.words.header(height, width)) + height * (width + 1) + 3 + (12 if prefill == THINK else 0)
    policy = tiny_writing.policy(writer=made, train=train, sampling={"max_new_tokens": longest, **sampling})
    batch = tiny_writing.batch(tasks())
    check_policy(policy, batch, needs=Needs(kl="k3"))
    trajectory = policy.rollout(batch)
    if prefill == DRAW:
        drawn = trajectory.mask.sum(1)
        assert drawn.tolist() == [height * width] * len(batch)
        assert set(trajectory.kind[trajectory.mask].tolist()) == {Kind.IMAGE_TOKEN}
        assert not any(written.truncated for written in trajectory.outputs)


def test_grammar_allows_text_before_or_instead_of_an_image():
    made = tiny_emu3.editor(prefill=THINK)
    prompts = made.encode(tasks()[:1])
    words = made.words
    text = made.words.text_ids("hm")
    ids = torch.tensor([[*text, words.boi, *words.header(*made.grid)]])
    vocabulary, forced = made.grammar.parse(prompts, ids)
    header = words.header(*made.grid)
    assert vocabulary[0].tolist() == [0] * 3 + [1] * (len(header) + 1)
    assert forced[0].tolist() == [-1] * 3 + header + [-1]
    assert made.grammar.vocabularies[0, words.eos]
    assert not made.grammar.vocabularies[0, [words.img, words.eol, words.eof, words.eoi, words.pad]].any()
    assert not (made.grammar.vocabularies[0] & made.grammar.vocabularies[1]).any()
    assert made.codes_in([*text]) is None


def test_malformed_image_without_the_grammar_decodes_to_none():
    made = tiny_emu3.editor(grammar=False)
    longest = len(made.target_ids([dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24))])[0]) + 1
    policy = tiny_writing.policy(writer=made, sampling={"max_new_tokens": longest})
    batch = tiny_writing.batch(tasks(), group_size=8)
    check_policy(policy, batch, needs=Needs())
    trajectory = policy.rollout(batch)
    assert torch.equal(trajectory.mask.sum(1), trajectory.lengths)  # nothing is forced
    images = CodesDecoder(made)([batch.tasks[k] for k in batch.group], trajectory)
    assert images == [None] * len(batch)
    # Ids that form a whole image are decoded, and all tokens after the header have the kind IMAGE_TOKEN.
    shown = policy.demonstrate(tiny_writing.batch((dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24)),)))
    assert CodesDecoder(made)(batch.tasks[:1], shown)[0] is not None
    assert shown.kind[0].tolist().count(Kind.IMAGE_TOKEN) == longest - len(made.words.header(*made.grid))


class OnlyOutputs:
    def __init__(self, outputs):
        self.outputs = outputs


def test_rows_without_a_complete_image_decode_to_none(editor):
    codes = editor.encode_codes([tiny_models.image(k, 16, 24) for k in range(3)])
    whole = [tuple(editor.words.image_ids(each)[1:]) for each in codes]
    key = (0, 0, 0, 0)
    outputs = [
        Completion(ids=whole[0], text="", truncated=False, key=key),
        Completion(ids=whole[1], text="", truncated=True, key=key),
        Completion(ids=whole[1][:6], text="", truncated=False, key=key),
        Completion(ids=whole[2], text="", truncated=False, key=key),
    ]
    images = CodesDecoder(editor, batch=1)([tasks()[0]] * 4, OnlyOutputs(outputs))
    assert [image is None for image in images] == [False, True, True, False]
    expected = editor.decode_codes(codes[[0, 2]])
    assert [images[0].tobytes(), images[3].tobytes()] == [image.tobytes() for image in expected]
    assert isinstance(editor, DecodesCodes)


def test_invalid_tasks_and_settings_raise(editor):
    with pytest.raises(ValueError, match="0 images"):
        editor.encode([Task(id="x", instruction="red")])
    with pytest.raises(ValueError, match="special token"):
        editor.encode([tiny_models.task("x", f"red {EOS}", tiny_models.image(0))])
    with pytest.raises(ValueError, match="multiples of"):
        Emu3Editor(editor.module, tiny_emu3.tokenizer(), vq=editor.vq, size=(15, 24))
    with pytest.raises(ValueError, match="has no token"):
        Emu3Editor(editor.module, tiny_models.qwen_tokenizer(), vq=editor.vq, size=(16, 24))
