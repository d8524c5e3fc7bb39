"""The TRL integration: completions as ids, three outcomes of a reward, keys of the noise, and TRL's trainer with tiny models."""

import importlib.util
from pathlib import Path

import pytest
import torch

import tiny_editing
import tiny_writers
import tiny_writing
from retouch.distributed.launching import rank_environments, run_ranks
from retouch.integrations.trl import RetouchReward, dataset_of, processor_for
from retouch.models.base import TURNS
from retouch.rewards.pixels import ShareReward
from retouch.run.step import TooManyMissing
from retouch_models.qwen_image.model import QwenImageEdit, QwenImageEditPlus
from retouch_models.qwen_image.responses import QwenResponses, ResponseEncoder, writer_for
from retouch_models.qwen_vl import QwenWriter
from retouch_models.responses import ResponseRenderer, ResponseSampler
from retouch_worlds.models.family import PlaygroundModel
from tiny_bridge import bridge, trl_call
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"
WITH_TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (extra `trl`)")
# TRL and transformers warn about deprecated names that they use themselves.
THEIRS = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


# What TRL passes to the reward


def test_images_are_rendered_from_completion_ids_and_not_from_text():
    function, spy = bridge()
    assert trl_call(function, [[7, 8, 2], [5], [6, 3], [2], []]) == [7.0, 5.0, 6.0, 9.0, 9.0]
    ((_, outputs),) = spy.seen
    assert [output.ids for output in outputs] == [(7, 8), (5,), (6,), (), ()]
    assert [output.text for output in outputs] == ["7 8", "5", "6", "", ""]
    assert [output.truncated for output in outputs] == [False, True, False, False, False]


def test_only_one_final_end_token_is_removed_from_a_completion():
    function, spy = bridge()
    trl_call(function, [[7, 2, 8], [7, 2, 2]])
    assert [output.ids for output in spy.seen[0][1]] == [(7, 2, 8), (7, 2)]


def test_a_reward_is_a_value_the_minimum_for_faults_or_none_for_missing_scores():
    metrics = {}
    function, _ = bridge(missing_at=5, combine={"light": 2.0, "dark": 1.0}, max_missing=0.25)
    # A value; the minima of the columns if the image could not be rendered; None if a score is missing.
    assert trl_call(function, [[7], [0], [5], [4]], log_metric=metrics.__setitem__) == [2 * 7 + 248, 2 * -1 + 0, None, 2 * 4 + 251]
    assert metrics == {
        "reward/light": pytest.approx((7 - 1 + 4) / 3),
        "reward/dark": pytest.approx((248 + 0 + 250 + 251) / 4),
        "reward/missing_fraction": 0.25,
        "reward/fault_fraction": 0.25,
    }


def test_a_column_without_any_score_is_not_logged():
    metrics = {}
    function, _ = bridge(missing_at=5, max_missing=1.0)
    assert trl_call(function, [[5]], log_metric=metrics.__setitem__) == [None]
    assert set(metrics) == {"reward/dark", "reward/missing_fraction", "reward/fault_fraction"}


def test_too_many_missing_scores_raise():
    function, _ = bridge(missing_at=5, max_missing=0.2)
    with pytest.raises(TooManyMissing, match="25% of the samples have no score, but max_missing allows only 20%"):
        trl_call(function, [[7], [6], [5], [4]])


def test_noise_is_keyed_by_seed_step_and_task():
    function, spy = bridge(seed=4)
    trl_call(function, [[7]] * 4, names=["a", "a", "b", "b"], step=6)
    trl_call(function, [[7]] * 4, names=["b", "b", "a", "a"], step=7)
    first, second = ([output.key for output in outputs] for _, outputs in spy.seen)
    a, b = first[0][2], first[2][2]
    assert (a, b == a) == (57024525917363133, False)  # a number that does not depend on the process, as that of hash() would
    assert first == [(4, 6, a, 0), (4, 6, a, 1), (4, 6, b, 2), (4, 6, b, 3)]
    assert second == [(4, 7, b, 0), (4, 7, b, 1), (4, 7, a, 2), (4, 7, a, 3)]


def test_rows_of_a_group_share_one_task():
    function, spy = bridge()
    trl_call(function, [[7]] * 4, names=["a", "a", "b", "b"])
    tasks = spy.seen[0][0]
    assert [task.id for task in tasks] == ["a", "a", "b", "b"]
    assert (tasks[0] is tasks[1], tasks[2] is tasks[3]) == (True, True)


def test_two_ranks_share_group_keys_have_distinct_slots_and_raise_together(tmp_path):
    command = [python(), "-W", "ignore", str(SUPPORT / "tiny_bridge.py"), str(tmp_path)]
    assert run_ranks(command, rank_environments(2), logs=tmp_path / "logs", grace=20.0) == 0
    (group, slots, said), (other_group, other_slots, other_said) = (
        (tmp_path / f"{rank}.txt").read_text().splitlines() for rank in (0, 1)
    )
    assert group == other_group  # a group with rows on both ranks
    assert (slots, other_slots) == ("[0, 1]", "[2, 3]")
    assert said == other_said
    assert said.startswith("25% of the samples have no score")


# The inputs of the writer


@WITH_TRL
@pytest.mark.parametrize("cls", [QwenImageEdit, QwenImageEditPlus])
def test_the_processor_encodes_prompts_and_images_like_the_writer(cls):
    from trl.data_utils import prepare_multimodal_messages

    writer = writer_for(tiny_editing.editor(tiny_editing.parts(), cls, condition_area=32 * 64), tiny_writers.module())
    tasks = tiny_editing.tasks()
    if cls is QwenImageEditPlus:
        tasks = (*tasks, tiny_writers.tasks()[2])  # of two images
    rows = [dataset_of(tasks, writer)[index] for index in range(len(tasks))]
    messages = [prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
    processor = processor_for(writer)
    read = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    for task, row, ids in zip(tasks, rows, read["input_ids"], strict=True):
        prompts = writer.encode([task])
        assert ids == prompts.ids[0].tolist()
        assert tasks[row["task"]] is task
    bodies = ["".join(writer.image_block.format(k) for k in range(1, len(row["images"]) + 1)) for row in rows]
    seen = writer.template.tokenise(bodies, [row["images"] for row in rows])
    assert torch.equal(torch.as_tensor(read["pixel_values"]), seen["pixel_values"])
    assert [len(row["images"]) for row in rows] == [len(task.images) for task in tasks]


@WITH_TRL
def test_the_processor_pads_on_the_left():
    """TRL pads the prompts' ids on the left; the token types, which determine the positions, must be aligned with them."""
    writer = writer_for(tiny_editing.editor(tiny_editing.parts()), tiny_writers.module())
    tasks = tiny_editing.tasks()[:2]
    processor = processor_for(writer)
    texts = [writer.template.head + task.instruction + writer.template.tail for task in tasks]
    read = processor(images=[list(task.images) for task in tasks], text=texts, padding=True, return_tensors="pt")
    prompts = writer.encode(tasks)
    assert torch.equal(read["attention_mask"].bool(), prompts.mask)
    assert not prompts.mask.all()
    assert torch.equal(read["mm_token_type_ids"].bool(), (prompts.ids == writer.image_token) & prompts.mask)
    assert writer.template.tokenizer.padding_side == "right"


@WITH_TRL
def test_jinja_syntax_in_a_template_or_prompt_is_not_evaluated():
    template = TURNS.format(system='say "{{ 1 + 1 }}" {% raw %} \\n é', user="{}")
    writer = QwenWriter(
        tiny_writers.module(), tiny_writers.tokenizer(), template=template,
        image_processor=tiny_writers.image_processor("qwen2.5-vl"),
    )  # fmt: skip
    text = processor_for(writer).apply_chat_template([{"role": "user", "content": [{"type": "text", "text": "{{ red }}"}]}])
    assert text == template.replace("{}", "{{ red }}")


@WITH_TRL
def test_processor_for_raises_for_a_text_only_writer():
    writer = QwenWriter(tiny_writers.module("qwen2.5"), tiny_writers.tokenizer(), template=tiny_writers.TEMPLATE)
    with pytest.raises(ValueError, match="takes no images; give TRL its tokenizer"):
        processor_for(writer)


# TRL's trainer


@WITH_TRL
@THEIRS
def test_grpo_trainer_trains_only_the_adapter_with_rewards_of_images(tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer

    editor = tiny_editing.editor(tiny_editing.parts())
    module = tiny_writers.module()
    module.requires_grad_(False)
    writer = writer_for(editor, module, stop=tiny_writing.STOPS)
    policy = get_peft_model(module, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    tasks = tiny_editing.tasks()[:2]
    kept, asked = [], []

    class Kept(ResponseSampler):
        def __call__(self, tasks, trajectory):
            kept.extend(trajectory.outputs)
            return super().__call__(tasks, trajectory)

    generate = module.generate
    monkeypatch.setattr(module, "generate", lambda **inputs: asked.append(inputs["input_ids"]) or generate(**inputs))
    encoder = ResponseEncoder(module, policy.disable_adapter)
    config = ResponseRenderer(model=PlaygroundModel(), encoder="policy", num_steps=2, cut_off="draw", guidance_scale=2.0)
    renderer = Kept(QwenResponses(editor, encoder), config)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=RetouchReward(writer, renderer, ShareReward(), combine={"share": 1.0}, task=lambda row: tasks[row["task"]]),
        args=GRPOConfig(
            str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2, max_completion_length=5,
            learning_rate=1e-2, bf16=False, use_cpu=True, report_to="none", logging_steps=1, save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=dataset_of(tasks, writer),
        processing_class=processor_for(writer),
    )  # fmt: skip
    trained_on = []
    score = trainer._generate_and_score_completions
    monkeypatch.setattr(trainer, "_generate_and_score_completions", lambda rows: trained_on.append(score(rows)) or trained_on[-1])
    trainer.train()
    prompts = [writer.encode([task]).ids[0].tolist() for task in tasks]
    for batch in asked:
        assert {tuple(k for k in row if k != writer.pad) for row in batch.tolist()} == {tuple(row) for row in prompts}
    columns = [zip(batch["completion_ids"], batch["completion_mask"], strict=True) for batch in trained_on]
    ids = [row[mask.bool()].tolist() for rows in columns for row, mask in rows]
    assert [list(output.ids) for output in kept] == [row[:-1] if row[-1] in writer.stop else row for row in ids]
    assert [output.truncated for output in kept] == [row[-1] not in writer.stop for row in ids]
    after = dict(policy.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before if "lora_" not in name)
    assert any(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    logged = [line for line in trainer.state.log_history if "reward" in line]
    assert len(logged) == 2
    assert all(line["reward"] == pytest.approx(line["reward/share"], abs=1e-5) for line in logged)
