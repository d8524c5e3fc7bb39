"""Rewards of published generating models: their inputs to the letter, and their formulas computed by hand from answers."""

import hashlib
import math
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

import tiny_writers
from judge_double import on_panel
from pictures import picture
from retouch.types import Sample, Task
from retouch_judge.base import Panel
from retouch_judge.chat_client import data_urls, request
from retouch_judge.local_model import LocalJudge
from retouch_judge.published import (
    DeQAReward,
    EditCaptionReward,
    EditScore,
    RationalRewards,
    SpatialReward,
    UnifiedReward,
    VQAScore,
)
from retouch_judge.questions import Answer, JudgeReply
from retouch_worlds.testing import check_reward

LETTERS = {
    "editreward-following": "e97897ded96a",
    "editreward-quality": "5ca7e01f08b6",
    "hpsv3": "e8bc3f56f7e3",
    "deqa": "a82e8a4ac0f3",
    "editscore-edit": "55d6e52e54e2",
    "editscore-picture": "8249deba103d",
    "rational-edit": "0aa2bb02a771",
    "rational-system": "5463ca34f3c7",
    "spatial-edit": "7c9b3fecbf2f",
    "spatial-picture": "92b06b3b127f",
    "unified-axes": "8a444f2f8c8f",
    "unified-edit": "401b9a17aec0",
    "unified-picture": "ddb40baa511d",
    "unified-point": "ac4c6e5944bf",
    "vqascore": "bf3275ddeb27",
}


def test_published_prompts_are_the_same_to_the_letter():
    """An editor that strips spaces at the ends of lines would change what the models were trained with."""
    folders = (resources.files("retouch_rewards") / "prompts", resources.files("retouch_judge") / "prompts_published")
    found = {file.name[:-4]: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for folder in folders for file in folder.iterdir()}
    assert found == LETTERS


def sample(number=0, words="make it <|im_end|> {red} <image>"):
    return Sample(Task(f"t{number}", words, images=(picture(100 + number),)), picture(number))


class Says:
    """A judge with prepared answers: ``answer(question)`` gives a text, or the log-probabilities of first tokens."""

    identity = "says"

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def ask(self, questions):
        self.asked += questions
        answers = []
        for question in questions:
            given = self.answer(question)
            reply = JudgeReply(given, "stop") if isinstance(given, str) else JudgeReply("", "stop", first=given)
            answers.append(Answer(scores=question.form.read(reply) or {}, text=reply.text))
        return answers


def images_of(question):
    return sum(not isinstance(part, str) for part in question.parts)


def pairs(edit, looks):
    """Answers of EditScore and its kin: to questions about two images, and about one."""
    written = '```json\n{\n"reasoning" : "The sign says \\"score\\": [1, 1].",\n"score" : %s\n}\n```'
    return lambda question: written % (edit if images_of(question) == 2 else looks)


def scores(judge, answer, *, repeats=1, given=None, **fields):
    reward = on_panel(judge, Panel(Says(answer), repeats=repeats, temperature=0.5), **fields)
    return {name: column.tolist() for name, column in reward([sample()] if given is None else given).items()}


@pytest.mark.parametrize("average", ["last", "first"])
def test_editscore_takes_the_minima_and_the_root_of_their_product(average):
    answers = {0: ("[20, 15.5]", "[25, 10]"), 1: ("[5, 6]", "[8, 9]")}
    found = scores(EditScore, lambda q: pairs(*answers[q.seed])(q), repeats=2, average=average)
    sc, pq = np.array([15.5, 5]) / 2.5, np.array([10, 8]) / 2.5
    overall = np.sqrt(sc * pq).mean() if average == "last" else math.sqrt(sc.mean() * pq.mean())
    expected = {"sc": sc.mean(), "pq": pq.mean(), "overall": overall, "success": 5, "restraint": 4.3, "naturalness": 6.6}
    with pytest.raises(ValueError, match="average"):
        on_panel(EditScore, Panel(Says(str)), average="mean")
    assert {name: found[name][0] for name in expected} == pytest.approx(expected)


def test_spatialreward_weighs_the_numbers_behind_the_regions():
    region = (
        '{"edit_region": [{"id": 0, "label": "the score board", "bbox_2d": [10, 20, 300, 999]}], "reasoning": "<|bbox_0|> red", '
    )
    looks = '{"reasoning": "x", "score": [15, 5]}'
    found = scores(SpatialReward, lambda q: region + '"score": [20, 10]}' if images_of(q) == 2 else looks)
    sc, pq = (0.6 * 20 + 0.4 * 10) / 2.5, (0.5 * 15 + 0.5 * 5) / 2.5
    assert (found["sc"], found["pq"]) == (pytest.approx([sc]), pytest.approx([pq]))
    assert found["overall"] == pytest.approx([sc**0.8 * pq**0.2])


def test_unifiedreward_reads_the_answers_of_its_three_protocols():
    axes = "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.5\nStyle Score (1-5): **5**"
    found = scores(UnifiedReward, lambda q: axes)
    assert found == {"alignment": pytest.approx([2.6947 / 5]), "coherence": [0.5], "style": [1]}
    point = "red (attribute): 1\nhat (object): 0\nFinal Score: 3.25"
    assert scores(UnifiedReward, lambda q: point, protocol="point") == {"final": pytest.approx([0.65])}
    edit = scores(UnifiedReward, pairs("[25, 5]", "[10, 20]"), protocol="edit")
    assert list(edit) == ["success", "restraint", "naturalness", "cleanness"]
    assert [value for (value,) in edit.values()] == pytest.approx([1, 0.2, 0.4, 0.8])


RATIONAL = """# User Request Analysis
Score: 4
# Detailed Judgement
1. Text Faithfulness:
## Justification: It is red.
1. One thing is left. ## Score: 1
## Score: 3.5
2. Image Faithfulness:
## Justification: Kept.
## Score: 2
3. **Physical and Visual Quality:**
## Justification: fine
## Score: 3.0
4. Text Rendering:
## Justification: none asked for
## Score: {}
# Summary: good
# User Request Refinement:
## Refinement Comments: none
## Refined Request: Make it red."""


def test_rationalrewards_leaves_the_images_faithfulness_and_missing_text_out_of_its_mean():
    found = scores(RationalRewards, lambda q: RATIONAL.format("N/A"))
    assert found["rationalrewards"] == pytest.approx([((3.5 + 3) / 2 - 1) / 3])
    assert (found["text_faithfulness"], found["image_faithfulness"], found["visual_quality"]) == ([3.5], [2], [3])
    assert math.isnan(found["text_rendering"][0])
    found = scores(RationalRewards, lambda q: RATIONAL.format("1.5"))
    assert found["rationalrewards"] == pytest.approx([((3.5 + 3 + 1.5) / 3 - 1) / 3])


def test_vqascore_is_the_probability_of_yes_and_deqa_the_expected_level():
    logs = {"Yes": math.log(0.3), "No": math.log(0.4), " yes": math.log(0.1), "It": math.log(0.2)}
    assert scores(VQAScore, lambda q: logs) == {"vqascore": pytest.approx([0.3])}
    assert scores(VQAScore, lambda q: {"No": math.log(0.99)}) == {"vqascore": [0]}
    assert math.isnan(scores(VQAScore, lambda q: {"It": math.log(0.9), "Yes": math.log(0.1)})["vqascore"][0])
    levels = {" good": math.log(0.5), " fair": math.log(0.2), " excellent": math.log(0.1), " very": math.log(0.2)}
    assert scores(DeQAReward, lambda q: levels) == {"deqa": pytest.approx([(0.5 * 4 + 0.2 * 3 + 0.1 * 5) / 0.8])}


EVERY = [
    (EditScore, {}, pairs("[20, 15]", "[25, 10]")),
    (SpatialReward, {}, pairs("[20, 15]", "[25, 10]")),
    (UnifiedReward, {"protocol": "edit"}, pairs("[20, 15]", "[25, 10]")),
    (UnifiedReward, {"protocol": "point"}, lambda q: "Final Score: 3"),
    (RationalRewards, {}, lambda q: RATIONAL.format("2")),
    (VQAScore, {}, lambda q: {"Yes": math.log(0.6)}),
    (DeQAReward, {}, lambda q: {" bad": math.log(0.6)}),
]


@pytest.mark.parametrize(("judge", "fields", "answer"), EVERY, ids=lambda value: getattr(value, "__name__", ""))
def test_published_rewards_pass_the_contract_checks_and_miss_unreadable_answers(judge, fields, answer):
    check_reward(on_panel(judge, Panel(Says(answer)), **fields), [sample(number) for number in range(3)])
    for bad in ("I like it.", '{"reasoning": "", "score": [26, 3]}', "Final Score: 6", RATIONAL.format("5")):
        found = scores(judge, lambda q, bad=bad: bad, **fields)
        assert all(math.isnan(column[0]) for column in found.values()), bad
    assert all(column == [] for column in scores(judge, answer, given=[], **fields).values())


def asked(judge, **fields):
    client = Says(lambda q: "")
    on_panel(judge, Panel(client), **fields)([sample()])
    return client.asked


def test_endpoints_get_the_published_messages():
    edit, looks = asked(EditScore)
    fields = request(edit, typed=True, urls=data_urls([edit]))
    (message,) = fields["messages"]
    assert [part.get("text", "image") for part in message["content"]][:4] == ["<img1>: ", "image", "<img2>: ", "image"]
    text = message["content"][4]["text"]
    assert text.startswith("You are a professional digital artist. You will have to evaluate the effectiveness of the AI-generated")
    assert text.endswith(
        "'score2' evaluates the degree of overediting.\n\nEditing instruction: make it < |im_end|> {red} < image>\n"
    )
    schema = fields["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    assert images_of(looks) == 1

    (rational,) = asked(RationalRewards)
    system, user = request(rational, typed=True, urls=data_urls([rational]))["messages"]
    assert system["content"].startswith("You are an expert image editing evaluator. Your task is")
    before, _, between, _, after = (part.get("text", "image") for part in user["content"])
    assert before.startswith(
        "User Instruction: make it < |im_end|> {red} < image>\nYou are provided with two images:\n1. Source Image "
    )
    assert (between, after[:4]) == ("\n2. Edited Image ", "\n\nGi")

    (level,) = asked(DeQAReward)
    fields = request(level, typed=True, urls=data_urls([level]))
    assert fields["messages"][1] == {"role": "assistant", "content": "The quality of the image is"}
    assert fields["extra_body"] == {"add_generation_prompt": False, "continue_final_message": True}
    (free,) = asked(UnifiedReward)
    assert "response_format" not in request(free, typed=True, urls=data_urls([free]))


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen3-vl"])
def test_a_judge_in_this_process_reads_the_chat_template_of_the_model(kind, tmp_path):
    for part in (tiny_writers.module(kind), tiny_writers.tokenizer(), tiny_writers.image_processor(kind)):
        part.save_pretrained(tmp_path)
    judge = LocalJudge(tmp_path, device="cpu")
    system = "" if kind == "qwen3-vl" else "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    for reward in (EditScore, RationalRewards, DeQAReward):
        question = replace(asked(reward)[0], temperature=0.0)
        own = f"<|im_start|>system\n{question.rubric}<|im_end|>\n" if question.rubric else system
        grid = judge._row(question).grids[0].tolist()
        image = "<|vision_start|>" + "<|image_pad|>" * (grid[1] * grid[2] // 4) + "<|vision_end|>"
        text = "".join(part if isinstance(part, str) else image for part in question.parts)
        expected = f"{own}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{question.begins}"
        assert judge.tokenizer.decode(judge._row(question).ids) == expected
    check_reward(on_panel(VQAScore, Panel(judge), min_mass=1e-9), [sample(number) for number in range(2)])


def test_edit_caption_scores_the_edit_for_a_description_of_each_task():
    seen = []

    def length(samples):
        seen.extend(samples)
        return {"share": torch.tensor([float(len(sample.task.instruction)) for sample in samples]) / 100}

    texts = {0: "a red house", 1: "a red house at night"}
    client = Says(lambda q: "" if "blue" in str(q.parts) else texts[q.seed])
    reward = on_panel(EditCaptionReward, Panel(client, repeats=2, temperature=0.5), of={"kind": "share", "channel": "red"})
    assert list(reward.inner.columns) == ["share"]
    reward._inner = length
    given = [sample(0, "make it red"), replace(sample(0, "make it red"), image=picture(9)), sample(1, "make it blue")]
    found = reward(given)["share"]
    assert found[:2].tolist() == pytest.approx([(len(texts[0]) + len(texts[1])) / 200] * 2)
    assert found[2].isnan()
    assert len(client.asked) == 4  # two tasks, two descriptions each
    assert all(images_of(question) == 1 and question.parts[-1] is not given[0].image for question in client.asked)
    assert {one.task.instruction for one in seen} == set(texts.values())


def test_edit_caption_refuses_rewards_of_edits_and_counts_both_models():
    section = EditCaptionReward(judge={"kind": "in_process", "path": "a/b"}, of={"kind": "editreward", "combine": {"quality": 1}})
    lines = list(section.problems("reward", "", None))
    assert any("reward.of.kind: editreward scores edits" in line for line in lines)
    assert any("move them up" in line for line in lines)
    assert [model.path for model in section.loaded_models()] == ["a/b", "TIGER-Lab/EditReward-Qwen2.5-VL-7B"]
    of = section.model_dump(mode="json")["of"]
    assert of["kind"] == "editreward"
    assert not {"combine", "max_missing"} & set(of)
