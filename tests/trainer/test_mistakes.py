"""Mistakes in the arguments of a ``Trainer`` are reported by the constructor, and those of a reward function when it is called; the
messages say what to do."""

import re
from functools import partial
from pathlib import Path

import accelerate
import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler
from peft import LoraConfig
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

import retouch
import tiny_pipelines
import tiny_writers
from retouch.config.other_names import TRL
from retouch.data.checks import accept_rows
from retouch.data.sources.hub import read_table
from retouch.rewards.function import FunctionReward
from retouch.rewards.scoring import scores_of
from retouch.types import Sample, Task
from retouch_worlds.data import PlaygroundData
from slow_params import slow_after

ROWS = [{"prompt": "a red circle" if number % 2 else "blue", "level": number} for number in range(8)]


def red(images, **rest):
    return [0.5] * len(images)


def positional(images, /):
    return [0.5] * len(images)


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipelines.sd3()


def changed_pipeline(change):
    made = tiny_pipelines.sd3()
    change(made)
    return made


def another_pipeline():
    return DDPMPipeline(unet=torch.nn.Linear(1, 1), scheduler=DDPMScheduler())


def llama():
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(config)


MISTAKES = [
    ({"model": None}, "model: NoneType cannot be trained; give a diffusers pipeline, a transformers model, a folder"),
    ({"model": torch.nn.Linear(1, 1)}, "model: Linear cannot be trained; give a diffusers pipeline"),
    ({"model": "/no/such/folder"}, "model: there is no folder /no/such/folder"),
    ({"reward_funcs": []}, "reward_funcs: empty; give at least one reward"),
    ({"reward_funcs": None}, "reward: there is none, and policy_gradient learns from the rewards"),
    ({"reward_funcs": 3}, "reward_funcs: 3 cannot be called; give a function"),
    ({"reward_funcs": "pikscore"}, "reward.kind: 'pikscore' is not one of 'photos'"),
    ({"reward_funcs": lambda images: [1.0]}, "a lambda has no name for its column; define the function with `def`"),
    ({"reward_funcs": [red, red]}, "two rewards are called 'red'; rename one of the functions"),
    ({"reward_funcs": positional}, "reward function positional: arguments are given by keyword"),
    ({"reward_weights": [1.0, 2.0]}, "reward_weights: 2 weights for 1 rewards; give one for each"),
    ({"reward_weights": {"blue": 1.0}}, "names the column 'blue', but the reward has no such column"),
    ({"reward_weights": "red +"}, "reward.combine: 'red +': the formula ends"),
    ({"reward_weights": [0.0]}, "reward.combine: all weights are 0"),
    ({"reward_funcs": "clip"}, "reward_weights: clip has the columns cosine, clip_score, similarity"),
    ({"train_dataset": None}, "train_dataset: missing; give a datasets.Dataset, a list of dictionaries, a folder"),
    ({"train_dataset": []}, "train_dataset: no rows"),
    ({"train_dataset": ["a", "b"]}, "train_dataset: a row is str; each row is a dictionary with a `prompt`"),
    ({"train_dataset": [{"caption": "a"}]}, "train_dataset: no column with the prompts; it has caption."),
    ({"train_dataset": pd.DataFrame(ROWS)}, "train_dataset: a DataFrame is read as a list of its rows; give df.to_dict("),
    ({"train_dataset": {"train": ROWS}}, "train_dataset: a dictionary; give one split of it"),
    ({"train_dataset": "/no/such"}, "train_dataset: no folder and no .txt or .jsonl file /no/such"),
    ({"train_dataset": datasets.Dataset.from_list(ROWS).to_iterable_dataset().shuffle(seed=0)},
     "train_dataset: the buffer of .shuffle() is lost when a run resumes"),
    ({"train_dataset": ROWS, "eval_dataset": datasets.Dataset.from_list(ROWS).to_iterable_dataset()},
     "eval_dataset: a streaming data set has no length; load it without streaming=True"),
    ({"train_dataset": PlaygroundData(count=4, complexity={1: 1.0}), "eval_dataset": ROWS},
     "eval_dataset: needs a table or a stream as train_dataset; give its rows as a list, or leave out eval_dataset"),
    ({"train_dataset": "photos", "eval_dataset": ROWS}, "eval_dataset: needs a table or a stream as train_dataset"),
    ({"train_dataset": Path(__file__).parents[2] / "recipes/sd3/prompts.txt", "columns": {"instruction": "caption"}},
     "columns: 'instruction' should be read from 'caption', but"),
    ({"data": {"path": "photos"}}, "data: give the data as train_dataset, and further keys as a dictionary"),
    ({"data": {"on_bad_rows": "skip"}}, "data.on_bad_rows: unknown key; did you mean data.on_bad_row?"),
    ({"train_dataset": PlaygroundData(count=4, complexity={1: 1.0}), "columns": {"instruction": "level"}},
     "columns: train_dataset is a PlaygroundData; give the columns to it, if it has such a key"),
    ({"columns": {"instruction": "caption"}}, "'instruction' should be read from 'caption', but"),
    ({"columns": {"instrction": "prompt"}}, "'instrction' is not a field; 'instruction' is"),
    ({"learning_rate": -1.0}, "learning_rate: should be greater than 0, not -1.0"),
    ({"learning_rate": "1e-4"}, "learning_rate: should be a valid number, not '1e-4'"),
    ({"learning_rat": 1e-4}, "learning_rat: unknown key; did you mean learning_rate?"),
    ({"policy": {}}, "policy: give model and peft_config instead"),
    ({"group_size": 1}, "group_size: 1 gives every sample the advantage 0; use 2 or more"),
    ({"size": "512"}, "size: '512'; give (height, width) in pixels"),
    ({"model": retouch.models.SD3(path="x"), "size": 256},
     "size: model is a section, which has its own; write retouch.models.NAME(..., size=[256, 256])"),
    ({"peft_config": {"r": 8}}, "peft_config: dict; give retouch.Lora(rank=32), a peft.LoraConfig"),
    ({"peft_config": LoraConfig(target_modules="all-linear")},
     "peft_config.target_modules: 'all-linear' is a pattern; give a list of endings of layer names, such as ['to_q', 'to_v']"),
    ({"peft_config": LoraConfig(use_dora=True)},
     "peft_config.use_dora: True is not supported; leave it at False. Retouch uses r, lora_alpha, lora_dropout, target_modules"),
    ({"peft_config": LoraConfig(bias="all")}, "peft_config.bias: 'all' is not supported; leave it at 'none'"),
    ({"peft_config": LoraConfig(use_rslora=True, rank_pattern={"to_q": 4})},
     "peft_config.use_rslora: True is not supported; leave it at False"),
    ({"peft_config": LoraConfig(init_lora_weights="olora")},
     "peft_config.init_lora_weights: 'olora' is not supported; leave it at True"),
    ({"objective": "grpo"}, "objective: 'grpo'; give an object: retouch.GRPO(clip=1e-4)"),
    ({"objective": retouch.GRPO(clip=0.2)}, "would never clip; use 1e-6 to 1e-4"),
    ({"renderer": "x"}, "renderer: this model makes images itself"),
    ({"objective": retouch.Supervised()}, "have no targets, and supervised needs them"),
    ({"rollout": {"num_step": 3}}, "rollout.num_step: unknown key; did you mean rollout.num_steps?"),
    ({"run_name": "a/b"}, "name: should have only letters, digits, '.', '_' and '-', not 'a/b'"),
    ({"model": "playground"}, "'playground' is the kind of a model in a recipe; write model=retouch.models.Playground()"),
    ({"model": "sd3"}, "write model=retouch.models.SD3(path=...)"),
    ({"rollout": {"num_steps": 4}}, 'missing: The transition of the steps that train, for example {"kind": "sde", "noise_level"'),
    ({"rollout": {"num_steps": 4, "transition": "sde"}}, "with a kind: {'kind': 'sde', 'noise_level': ...}, not 'sde'"),
    ({"callbacks": [print]}, "is not a retouch.Callback; derive a class from it"),
    ({"steps": None}, "steps: missing: set the length of the run, in steps or in passes"),
    ({"steps": 3, "passes": 1.0}, "steps: set either steps or passes"),
    ({"optimizer": {"beta1": 0.9}}, "optimizer.beta1: unknown key; did you mean optimizer.beta"),
    ({"device": "gpu"}, "device: should be 'auto', 'cuda', 'cuda:0', 'mps' or 'cpu', not 'gpu'"),
    (
        {
            "model": partial(tiny_writers.module, "qwen2.5"),
            "processing_class": partial(tiny_writers.tokenizer),
            "renderer": "/models/llama",
        },
        "renderer: there is no folder /models/llama, and no such repository",
    ),
    ({"model": partial(tiny_writers.module, "qwen2.5"), "processing_class": partial(tiny_writers.tokenizer)},
     "renderer: missing; a language-model policy needs one"),
    ({"model": partial(tiny_writers.module, "qwen2.5")}, "processing_class: missing; give the tokenizer"),
    ({"model": partial(tiny_writers.module, "qwen2.5-vl"), "processing_class": partial(tiny_writers.tokenizer)},
     "processing_class: a Qwen2Tokenizer reads no images; give AutoProcessor.from_pretrained(...) of the model"),
    ({"model": partial(llama), "processing_class": partial(tiny_writers.tokenizer)},
     "model: LlamaForCausalLM is a 'llama' model, which is not supported; supported are qwen2, qwen3, qwen2_vl"),
    ({"processing_class": partial(tiny_writers.tokenizer)}, "processing_class: it belongs to a loaded language model; omit it"),
    ({"model": partial(another_pipeline)}, "model: DDPMPipeline.__call__ takes no prompt; it cannot train"),
    ({"model": partial(changed_pipeline, lambda pipe: pipe.transformer.to(torch.float64))},
     "model.transformer: weights of the dtype float64 cannot be trained; load the model in float32, bfloat16, float16"),
    ({"model": partial(changed_pipeline, lambda pipe: pipe.transformer.to("meta"))},
     "model.transformer: weights of this SD3Transformer2DModel are on the meta device; load them first"),
    ({"model": partial(changed_pipeline, lambda pipe: accelerate.cpu_offload(pipe.text_encoder, torch.device("cpu")))},
     "model.text_encoder: this CLIPTextModelWithProjection is offloaded (enable_model_cpu_offload or device_map)"),
    ({"model": partial(changed_pipeline, lambda pipe: setattr(pipe.transformer, "is_quantized", True))},
     "model.transformer: this SD3Transformer2DModel is quantized in a way that is not known to train; load it in bfloat16 or"),
    ({"minibatches": 5}, "minibatches: "),
    ({"num_generations": 8}, "num_generations: unknown key; for TRL's num_generations write group_size=8"),
    ({"max_steps": 3, "save_steps": 1}, "save_steps: unknown key; for TRL's save_steps write checkpoints={'every': 1}"),
    ({"logging_steps": 1}, "logging_steps: unknown key; every step is one line of metrics.jsonl"),
    ({"args": None}, "args: unknown key; give the values of GRPOConfig as arguments, under the names of docs/coming-from.md"),
    ({"weight_decay": 0.1}, "weight_decay: unknown key; write optimizer={'weight_decay': 0.1}"),
    ({"rollout": {"kind": "tokens", "max_completion_length": 8}},
     "rollout.max_completion_length: unknown key; TRL's max_completion_length is rollout.max_new_tokens"),
]  # fmt: skip
NOT_PASTED = ("reward_weights", "output_dir", "run_name")  # arguments of a Trainer too
GIVEN = {
    **{"bf16": True, "use_vllm": True, "push_to_hub": True, "loss_type": "grpo", "importance_sampling_level": "sequence"},
    **{"scale_rewards": "none", "report_to": "wandb", "eval_strategy": "steps", "logging_dir": "logs", "warmup_ratio": 0.05},
    **{"beta": 0.02, "epsilon": 0.1, "epsilon_high": 0.3, "delta": 3.0, "num_generations": 4, "num_iterations": 2, "lr": 3e-5},
    **{"per_device_train_batch_size": 2, "max_completion_length": 64, "temperature": 0.9, "hub_model_id": "me/fox"},
}
"""What a script for TRL writes; the other names have their usual values."""
COMMON = ("learning_rate", "num_generations", "beta", "epsilon", "num_iterations", "per_device_train_batch_size")
COMMON += ("max_completion_length", "temperature")


@pytest.fixture(params=["image model", "writer"])
def given(request, pipe):
    writer = {"model": tiny_writers.module("qwen2.5"), "processing_class": tiny_writers.tokenizer(), "renderer": pipe}
    model = {"model": pipe} if request.param == "image model" else writer
    return {**model, "reward_funcs": red, "train_dataset": ROWS, "peft_config": retouch.Lora(rank=2, alpha=2)}


def pasted(given, trl):
    """The recipe of a Trainer whose arguments of TRL were replaced by what the messages say, and the messages."""
    with pytest.raises(ValueError, match="unknown key") as caught:
        retouch.Trainer(**given, **trl)
    said = re.findall(r"(?<= write )(?!it out)(.*)$", str(caught.value), re.MULTILINE)
    known = {name: value for name, value in trl.items() if f"{name}: unknown" not in str(caught.value).replace(", ", ": unknown, ")}
    names = {"retouch": retouch, "given": {**given, **known}}
    exec(f"new = dict({', '.join(said)})", names)  # an argument that is written twice is a SyntaxError
    model = {"model": given["model"]} if "model" in names["new"] else {}
    return retouch.Trainer(**{**given, **known, **names["new"], **model}).recipe, str(caught.value)


@pytest.mark.parametrize("name", slow_after(30, [name for name in TRL if name not in NOT_PASTED]))
def test_what_the_hint_for_a_name_of_another_trainer_says_can_be_pasted(name, given):
    if not TRL[name][0]:
        with pytest.raises(ValueError, match=re.escape(f"{name}: unknown key; {TRL[name][2]}")):
            retouch.Trainer(**given, **{name: 1})
    else:
        pasted(given, {name: GIVEN.get(name, TRL[name][2])})


def test_the_hints_for_a_whole_script_of_trl_can_be_pasted_together_and_keep_its_values(given):
    writes = "renderer" in given
    trl = {
        "learning_rate": 3e-5,
        **{name: GIVEN[name] for name in COMMON if name in GIVEN},
        "warmup_ratio": 0.05,
        "weight_decay": 0.1,
    }
    for first in COMMON:
        for second in COMMON[: COMMON.index(first)]:
            if first in GIVEN:
                pasted(given, {name: trl[name] for name in (second, first)})
    made, said = pasted(given, trl)
    assert "beta, epsilon: unknown key; for TRL's beta and TRL's epsilon write objective=retouch.GRPO(kl=0.02, clip=" in said
    assert (made.learning_rate, made.group_size, made.epochs, made.microbatch) == (3e-5, 4, 2, 2)
    assert (made.objective.kl.weight, made.objective.clip_low) == (0.02, 0.1 if writes else 1e-4)
    assert (made.optimizer.warmup_steps, made.optimizer.weight_decay) == (0.05, 0.1)
    assert not writes or (made.rollout.max_new_tokens, made.rollout.temperature) == (64, 0.9)
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 8}
    assert pasted(given, batch)[0].tasks_per_step == 4


def test_the_kl_of_a_number_fits_the_policy_and_a_dictionary_is_its_section(pipe):
    writer = {"model": tiny_writers.module("qwen2.5"), "processing_class": tiny_writers.tokenizer(), "renderer": pipe}
    found = []
    for model in ({"model": pipe}, writer):
        given = {**model, "reward_funcs": red, "train_dataset": ROWS, "peft_config": retouch.Lora(rank=2, alpha=2)}
        for objective in (retouch.GRPO(kl=0.04), retouch.GRPO(clip=1e-4, kl={"weight": 0.04}), retouch.REINFORCE(kl=0.04)):
            made = retouch.Trainer(**given, objective=objective).recipe.objective
            found.append((made.kl.kind, made.kl.weight, made.clip_high))
    assert found == [*[("closed", 0.04, clip) for clip in (1e-4, 1e-4, None)], *[("k3", 0.04, clip) for clip in (0.2, 1e-4, None)]]
    assert retouch.GRPO(kl={"kind": "velocity", "weight": 0.5}).kl == retouch.Kl(kind="velocity", weight=0.5)


def test_a_conversation_of_trl_with_one_message_of_the_user_is_a_prompt_and_others_are_refused():
    def message(content, role="user"):
        return {"role": role, "content": content}

    parts = [{"type": "image"}, {"type": "text", "text": "a fox"}]
    table = [{"prompt": [message("a fox")]}, {"prompt": [message(parts)]}]
    for rows in (table, datasets.Dataset.from_list(table[:1]), datasets.Dataset.from_list(table[1:])):
        read = read_table(rows, columns={}, name="train_dataset")
        assert {read[at].instruction for at in range(len(rows))} == {"a fox"}
    for messages, said in (
        (
            [message("be brief", "system"), message("a fox")],
            "a conversation with the messages system, user; give one message of the",
        ),
        ([message("a fox"), message("yes", "assistant"), message("a cat")], "with the messages user, assistant, user; give one"),
        ([message([{"type": "image", "image": "fox.png"}])], "put the image into the column 'image'"),
        ([message("")], "'prompt': the instruction is empty"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_table([{"prompt": messages}], columns={}, name="train_dataset")[0]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_wrong_trainer_arguments_raise_with_a_specific_message(changes, message, pipe):
    changes = {key: value() if isinstance(value, partial) else value for key, value in changes.items()}
    lora = retouch.Lora(rank=2, alpha=2)
    arguments = {"model": pipe, "reward_funcs": red, "train_dataset": ROWS, "peft_config": lora, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        retouch.Trainer(**arguments)


def test_what_the_message_about_bad_rows_says_can_be_set_from_python(pipe):
    given = {
        "model": pipe,
        "reward_funcs": red,
        "train_dataset": [*ROWS, {"prompt": ""}],
        "peft_config": retouch.Lora(rank=2, alpha=2),
    }
    refused = retouch.Trainer(**given, steps=1).recipe
    skipping = retouch.Trainer(**given, steps=1, data={"on_bad_row": "skip"})
    assert (refused.data.on_bad_row, skipping.recipe.data.on_bad_row) == ("refuse", "skip")
    with pytest.raises(ValueError, match=re.escape("(an argument of a Trainer: data={'on_bad_row': 'skip'})")):
        accept_rows(read_table(given["train_dataset"], columns={}, name="t"), on_bad_row="refuse")


def test_the_supported_settings_of_a_lora_config_are_used(pipe):
    given = LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": ["to_v", "to_q"]},
        **{"task_type": "CAUSAL_LM", "inference_mode": True, "init_lora_weights": "gaussian"},
    )
    made = retouch.Trainer(pipe, red, ROWS, peft_config=given)
    assert made.recipe.policy.train == retouch.Lora(rank=4, alpha=6.0, targets=("to_q", "to_v"))
    assert retouch.Trainer(pipe, red, ROWS, peft_config=LoraConfig()).recipe.policy.train == retouch.Lora(rank=8, alpha=8.0)


def test_an_array_as_image_is_a_problem_of_its_row():
    for value in (np.zeros((4, 4, 3)), [np.zeros((4, 4, 3))]):
        rows = read_table([{"prompt": "a", "image": value}], columns={}, name="train_dataset")
        with pytest.raises(
            ValueError, match="train_dataset:1: error: 'image': should be a PIL image, a path or the bytes of a file"
        ):
            rows[0]


def unknown(images, caption):
    return [1.0] * len(images)


def returning(name, score):
    """A reward function that returns ``score`` of its images."""

    def function(images):
        return score(images)

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train_dataset": ROWS}, "argument 'caption', but train_dataset has no such column; its columns are level, and"),
        ({"train_dataset": [{**row, "caption": "red"} for row in ROWS], "eval_dataset": ROWS},
         "argument 'caption', but eval_dataset has no such column; its columns are level, and"),
        ({"train_dataset": ROWS, "columns": {"instruction": "prompt", "text": "level"}},
         "argument 'caption', but train_dataset has no such column; its columns are (none), and"),
    ],
)  # fmt: skip
def test_an_argument_of_a_reward_function_that_no_table_has_is_refused_by_the_constructor(pipe, tables, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        retouch.Trainer(model=pipe, reward_funcs=[red, unknown], **tables)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unknown, "reward function unknown has the argument 'caption', but the data set has no such column; its columns are level"),
        (returning("short", lambda images: [1.0]), "reward function short returned 1 scores for 2 images; return one per image"),
        (
            returning("nothing", lambda images: None),
            "reward function nothing returned NoneType; return a list of floats, one per image",
        ),
        (returning("words", lambda images: ["good"] * 2), "returned 'good' as a score, which is text; return a number, or None"),
        (
            returning("infinite", lambda images: [float("inf")] * 2),
            "reward function infinite returned inf; return a finite number, or None",
        ),
        (
            returning("mapping", lambda images: {"score": [1.0] * 2}),
            "reward function mapping returned dict; return a list of floats",
        ),
        (
            retouch.reward(low=0, high=1)(returning("outside", lambda images: [2.0] * 2)),
            "column 'outside' is 2.0, outside its declared range 0.0 to 1.0",
        ),
    ],
)
def test_invalid_reward_functions_raise(function, message):
    samples = [Sample(Task(str(number), "blue", meta={"level": number}), Image.new("RGB", (4, 4))) for number in range(2)]
    with pytest.raises(ValueError, match=re.escape(message)):
        scores_of(FunctionReward.of(function), samples)


def above(images, *, level):
    return [level] * len(images)


@retouch.reward(low=0, high=9)
def below(images, *, level, rest=None):
    return [level + 1] * len(images)


def test_partial_reward_functions_keep_the_function_name_and_have_distinct_hashes():
    given = [partial(above, level=1.0), partial(above, level=2.0), partial(below, level=1.0), partial(below, level=1.0, rest=above)]
    made = [FunctionReward.of(function) for function in given]
    assert [each.name for each in made] == ["above", "above", "below", "below"]
    assert len({each.source for each in made}) == 4
    assert FunctionReward.of(partial(partial(above), level=2.0)).source == made[1].source
    assert FunctionReward.of(above).source not in {each.source for each in made}
    assert made[2].columns["below"].high == 9
    assert FunctionReward.of(partial(above, level=object())).source == FunctionReward.of(partial(above, level=object())).source
    with pytest.raises(ValueError, match="a lambda has no name"):
        FunctionReward.of(partial(lambda images, level: [level] * len(images), level=1.0))


def test_reward_functions_can_return_tensors_and_generators_with_none():
    samples = [Sample(Task(str(number), "blue", meta={"level": number}), Image.new("RGB", (4, 4))) for number in range(2)]

    def tensor(images):
        return torch.tensor([0.5, 1.0], requires_grad=True)

    def array(prompts, level, missing=3):
        return (float(number) if number else None for number in level)

    assert scores_of(FunctionReward.of(tensor), samples)["tensor"].tolist() == [0.5, 1.0]
    scored = scores_of(FunctionReward.of(array), samples)["array"]
    assert scored[0].isnan()
    assert scored[1] == 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: retouch.Lora(rank=0, alpha=1), "Lora: rank: should be greater than or equal to 1, not 0"),
        (lambda: retouch.Lora(), "Lora: rank: missing: Inner width of each adapter."),
        (lambda: retouch.Lora(rank=8, alpha=16, target=["to_q"]), "Lora: target: unknown key; did you mean targets?"),
        (lambda: retouch.GRPO(epsilon=0.2), "PolicyGradient: epsilon: unknown key; for TRL's epsilon write clip=0.2"),
        (lambda: retouch.GRPO(kl={"kind": "k4", "weight": 1.0}), "Kl: kind: should be 'closed', 'velocity' or 'k3'"),
        (lambda: retouch.GRPO(kl={"kind": "k3"}), "Kl: weight: missing: Weight of the KL in the loss."),
        (lambda: retouch.GRPO(num_generations=8), "TRL's num_generations write retouch.Trainer(..., group_size=8)"),
        (lambda: retouch.GRPO(clip=-1.0), "PolicyGradient: clip_low: should be greater than 0, not -1.0"),
        (lambda: retouch.Kl(kind="k4", weight=0.1), "Kl: kind: should be 'closed', 'velocity' or 'k3', not 'k4'"),
        (lambda: retouch.models.SD3(path="x", size=(0, 64)), "SD3Model: size.0: should be greater than or equal to 1, not 0"),
        (lambda: retouch.rewards.load("pikscore"), "there is no reward 'pikscore'; did you mean 'pickscore'?"),
        (lambda: retouch.rewards.load("share", chanel="red"), "chanel: unknown key; did you mean channel?"),
    ],
)
def test_invalid_section_arguments_raise_without_pydantic_terms(make, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make()
    assert "pydantic" not in str(caught.value)
    assert "validation error" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": [Image.new("P", (4, 4))]}, "images[0] has mode P, but rewards read RGB images; give image.convert('RGB')"),
        ({"images": [Image.new("RGB", (4, 4)), torch.zeros(3, 4, 4)]}, "images[1] is of type Tensor; give PIL images"),
        ({"images": [Image.new("RGB", (4, 4))], "sources": [Image.new("RGBA", (4, 4))]}, "sources[0] has mode RGBA"),
        ({"images": [Image.new("RGB", (4, 4))], "prompts": ["a", "b"]}, "prompts has length 2, but there are 1 images; give"),
    ],
)
def test_reward_inputs_of_wrong_mode_type_or_length_raise(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        retouch.rewards.load("share", channel="red")(given.pop("images"), **given)


def test_a_reward_range_that_is_infinite_or_empty_raises():
    for low, high in ((1, 0), (0, 0), (0, float("inf")), (float("nan"), 1)):
        with pytest.raises(ValueError, match="give finite numbers with low < high"):
            retouch.reward(low=low, high=high)
