"""The recipe: accepted values, rejected values and their messages, what can differ when a run resumes, and the keys of kernels."""

import json
from functools import partial
from typing import Any

import pytest
import torch

import changed_recipes
import tiny_models
from retouch.config.errors import alternatives, keys_of
from retouch.distributed.ranks import find_device, init_distributed_from_recipe, scoring_device
from retouch.recipe.derived_facts import differences
from retouch.recipe.document import apply, value_of
from retouch.recipe.keys import Optimizer
from retouch.recipe.recipe import Recipe, check_ranks, load, parse
from retouch_models.sd3 import SD3Model
from retouch_plan.system import PlannedDevice, check_kernels
from tiny_recipes import SMALL

GRPO = {"kind": "policy_gradient", "clip_low": 1e-5, "clip_high": 1e-5}
BASE: dict[str, Any] = {
    "name": "try", "steps": 10, "tasks_per_step": 4, "group_size": 6, "learning_rate": 1e-4,
    "policy": {"kind": "denoising", "model": {"kind": "playground"}, "train": {"kind": "lora", "rank": 8, "alpha": 16}},
    "rollout": {"num_steps": 6, "transition": {"kind": "cps", "noise_level": 0.7}, "window": {"mode": "window", "size": 2}},
    "data": {"kind": "playground", "complexity": [2, 3], "count": 100},
    "reward": {"kind": "playground", "combine": {"overall": 1}},
    "objective": GRPO,
}  # fmt: skip
FOLDER = {"data": {"kind": "folder", "path": "photos"}, "reward": {"kind": "photos", "colour": [1, 2, 3], "combine": {"colour": 1}}}

SHARE = {"kind": "share", "combine": {"share": 1}}
PROMPTS = {"data": {"kind": "prompts", "path": "prompts.txt"}, "reward": SHARE}
TRIPLETS = {"data": {"kind": "triplets", "path": "triplets"}, "reward": SHARE}

changed, raised = partial(changed_recipes.changed, BASE), partial(changed_recipes.raised, BASE)


def test_defaults_are_written_out_and_read_back_and_an_imported_reward_keeps_its_class():
    recipe = parse(BASE)
    document = recipe.document()
    assert (document["out"], document["device"], document["trackers"]) == ("runs", "auto", ["tensorboard"])
    assert document["policy"]["train"]["targets"] is None
    assert document["rollout"]["window"] == {"mode": "window", "size": 2, "low": 0, "high": None}
    assert parse(json.loads(json.dumps(document))) == recipe
    named = parse(changed(reward={"kind": "import", "class": "mine.rewards:Red", "args": {"k": [1, None]}, "combine": {"red": 1}}))
    assert named.reward.class_ == named.document()["reward"]["class"] == "mine.rewards:Red"
    assert parse(named.document()) == named


def test_every_key_is_documented():
    def undocumented(section):
        for key, field in keys_of(section).items():
            if key not in ("kind", "mode") and not field.description:
                yield f"{section.__name__}.{key}"
            for inner in alternatives(field.annotation):
                yield from undocumented(inner)

    assert list(undocumented(Recipe)) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({**FOLDER, "data__pathh": "x"}, "data.pathh: unknown key; did you mean data.path?"),
        ({"steqs": 3}, "steqs: unknown key; did you mean steps?"),
        ({"guidance_scale": 3}, "guidance_scale: unknown key; there is rollout.guidance_scale or renderer.guidance_scale or "
         "objective.teacher.guidance_scale"),
        ({"advantage": {"kind": "group", "max_missing": 1}},
         "advantage.max_missing: unknown key; there is reward.max_missing or reward.of.max_missing or reward.of.of.max_missing"),
        ({"noiselevel": 1}, "noiselevel: unknown key; did you mean rollout.transition.noise_level?"),
        (
            {"objective__beta": 2},
            "objective.beta: unknown key; only 'nft' or 'dpo' or 'dgpo' or 'crd' has it, and this is 'policy_gradient'; "
            "TRL's beta is objective.kl.weight",
        ),
        ({"num_generations": 8}, "num_generations: unknown key; TRL's num_generations is group_size"),
        ({"max_steps": 8}, "max_steps: unknown key; TRL's max_steps is steps"),
        ({"objective__delta": 2}, "objective.delta: unknown key; TRL's delta is objective.dual"),
        ({"rollout__use_vllm": True}, "rollout.use_vllm: unknown key; TRL's use_vllm is rollout.engine"),
        ({"logging_steps": 1}, "logging_steps: unknown key; every step is one line of metrics.jsonl"),
        ({"rollout__window__stride": 2},
         "rollout.window.stride: unknown key; only 'sliding' has it, and this is 'window' or 'branch'"),
        ({"policy__train__rnk": 2}, "policy.train.rnk: unknown key; did you mean policy.train.rank?"),
        ({"phases": [{"name": "a", "step": 3}], "steps": None}, "phases.0.step: unknown key; did you mean phases.0.steps?"),
        (
            {"objective__kind": "nfl"},
            "objective.kind: 'nfl' is not one of 'policy_gradient', 'nft', 'awm', 'draft', 'refl', 'opd', 'dpo', 'dgpo', 'crd', "
            "'supervised', 'sft', 'import'; did you mean 'nft'?",
        ),
        ({"rollout__window": {"size": 2}}, "rollout.window.mode: missing: one of 'all', 'window', 'branch', 'sliding', 'import'"),
        ({"rollout__reduction": "men"}, "rollout.reduction: 'men' is not 'mean' or 'sum'; did you mean 'mean'?"),
        ({"policy__train": {"kind": "lora", "alpha": 2}}, "policy.train.rank: missing: Inner width of each adapter."),
        (
            {"objective__clip": 0.2},
            "objective.clip: unknown key; did you mean objective.clip_low or objective.clip_high?; there is reward.clip or "
            "advantage.clip or reward.of.clip or ...",
        ),
        (
            {"reward__combine": [0.7, 0.3]},
            "reward.combine: should be a weight for each column, such as {overall: 1}, or a formula, such as 'a * b', "
            "not [0.7, 0.3]",
        ),
        ({"steps": 2.5}, "steps: should be a valid integer, not 2.5"),
        ({"steps": "3"}, "steps: should be a valid integer, not '3'"),
        ({"steps": True}, "steps: should be a valid integer, not True"),
        ({"steps": 0}, "steps: should be greater than or equal to 1, not 0"),
        ({"learning_rate": "NaN"}, "learning_rate: should be a valid number, not 'NaN'"),
        ({"data__complexity": [1, 5]}, "data.complexity.5: should be less than or equal to 4, not '5'"),
        ({"rollout__transition__noise_level": 1.5}, "rollout.transition.noise_level: should be less than or equal to 1, not 1.5"),
        ({**FOLDER, "data__held_out": 1.5}, "data.held_out: should be a share below 1, a whole number of rows, or 'all', not 1.5"),
        ({**FOLDER, "data__held_out": "al"},
         "data.held_out: should be a share below 1, a whole number of rows, or 'all', not 'al'"),
        ({"phases": {"0": {"steps": 3}}}, "phases: should be a valid array, not {'0': {'steps': 3}}"),
        ({**FOLDER, "data__tags": "kind"}, "data.tags: should be a valid array, not 'kind'; write [\"kind\"]"),
        ({"trackers": "wandb, trackio"}, 'trackers: should be a valid array, not \'wandb, trackio\'; write ["wandb", "trackio"]'),
        ({"eval__headline": {"kind": "add"}}, "eval.headline.kind: should be a valid array, not 'add'; write [\"add\"]"),
        ({"policy__model__size": "24"}, "policy.model.size: should be a valid array, not '24'"),
    ],
)  # fmt: skip
def test_invalid_keys_and_values_are_reported_with_their_full_path(changes, line):
    assert line in raised(**changes)


def test_all_errors_are_reported_together_without_pydantic_text():
    lines = raised(steps="many", polcy=1, rollout__num_steps=None)
    assert {line.split(":")[0] for line in lines} == {"steps", "polcy", "rollout.num_steps"}
    assert not any("pydantic" in line or "http" in line for line in lines)


def test_a_name_that_is_not_a_plain_folder_name_and_a_length_of_a_recipe_with_phases_are_rejected():
    for name in ("a/b", "..", "../up", "", ".hidden", "a b"):
        assert raised(name=name)[0].startswith("name: ")
    for key, given in (("steps", "5"), ("passes", "0.5")):
        with pytest.raises(ValueError, match="each phase has its own length") as refused:
            load("flux-fill/tiny", [f"{key}={given}"])
        assert f"--set phases.0.{key}={given} (warm-up) or --set phases.1.{key}={given} (rl)" in str(refused.value)


ODE = {"kind": "ode"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"passes": 2.0}, "steps"), ({"steps": None}, "steps"), ({"phases": []}, "phases"),
        ({"phases": [{"name": "a", "steps": 2}]}, "steps"), ({"steps": None, "phases": [{"name": "a"}]}, "phases.0.steps"),
        ({"steps": None, "phases": [{"name": "a", "steps": 2}, {"name": "a", "steps": 3}]}, "phases.1.name"),
        ({"steps": None, "phases": [{"name": "a", "steps": 2, "keep_optimizer": True}]}, "phases.0.keep_optimizer"),
        ({"steps": None, "phases": [{"name": "a", "steps": 0}, {"name": "b", "steps": 0}]}, "phases"),
        ({"reward__combine": {}}, "reward.combine"), ({"reward__combine": {"overall": 0}}, "reward.combine"),
        ({"group_size": 1}, "group_size"),
        ({"steps": None, "phases": [{"name": "a", "steps": 2, "group_size": 1}]}, "phases.0.group_size"),
        ({"group_size": 1, "tasks_per_step": 1, "advantage": {"kind": "batch"}}, "tasks_per_step"),
        ({"advantage": {"kind": "gae"}, "objective__surrogate": "gspo"}, "objective.surrogate"),
        ({"advantage": {"kind": "gae", "head": {"coefficient": 0.1}}}, "advantage.head.coefficient"),
        ({"advantage": {"kind": "gae"}, "objective": {"kind": "nft"}, "rollout": {"num_steps": 4, "transition": {"kind": "ode"}}},
         "objective.kind"),
        ({"rollout__transition": {"kind": "ode"}}, "rollout.transition.kind"),
        ({"rollout__transition__noise_level": 0}, "rollout.transition.noise_level"),
        ({"rollout__window__high": 6}, "rollout.window.high"), ({"rollout__window__size": 6}, "rollout.window.size"),
        ({"rollout__window": {"mode": "window", "size": 2, "low": 2, "high": 3}}, "rollout.window.size"),
        ({"rollout__window": {"mode": "sliding", "size": 6}}, "rollout.window.size"),
        ({"rollout__window": {"mode": "sliding", "size": 1, "stride": 2}}, "rollout.window.stride"),
        ({"rollout__num_steps": 1}, "rollout.num_steps"),
        ({"objective__clip_low": None}, "objective.clip_low, objective.clip_high"),
        ({"objective__clip_high": 0.2}, "objective.clip_low, objective.clip_high"),
        ({"rollout__reduction": "sum"}, "objective.clip_low, objective.clip_high"),
        ({"objective__surrogate": "reinforce"}, "objective.clip_low, objective.clip_high"),
        ({"objective__surrogate": "gspo", "microbatch": 1}, "microbatch"),
        ({"objective": {"kind": "policy_gradient", "surrogate": "dppo"}}, "objective.kl_limit"),
        ({"objective": {"kind": "policy_gradient", "surrogate": "reinforce"}, "epochs": 2}, "epochs, minibatches"),
        ({"objective": {"kind": "policy_gradient", "surrogate": "reinforce", "ratio_norm": True}}, "objective.ratio_norm"),
        ({"objective__surrogate": "cispo", "objective__dual": 3.0}, "objective.dual"),
        ({"policy__train__dropout": 0.1}, "policy.train.dropout"),
        ({"objective": {"kind": "nft"}, "rollout": {"num_steps": 4, "transition": {"kind": "ode"}, "shared_noise": True}},
         "rollout.shared_noise"),
        ({"objective": {"kind": "nft"}, "rollout__transition": ODE, "rollout__shared_noise": False}, "rollout.window"),
        ({"optimizer": {"warmup_steps": 11}}, "optimizer.warmup_steps"),
        ({"optimizer": {"final_share": 0.1}}, "optimizer.final_share"),
        ({"optimizer": {"moments": "8bit"}, "sharding": "fsdp2"}, "optimizer.moments"),
        ({"optimizer": {"moments": "cpu"}, "sharding": "zero2"}, "optimizer.moments"),
        ({"data": {"kind": "folder", "path": "x"}}, "reward.kind"),
        ({**FOLDER, "data": {"kind": "folder", "path": ""}}, "data.path"),
        ({**FOLDER, "data": {"kind": "prompts", "path": "x"}}, "data.kind"),
        ({**FOLDER, "objective": {"kind": "supervised"}, "data": {"kind": "prompts", "path": "x"}}, "data"),
        ({**FOLDER, "data__size": [24, 24], "policy__model__size": [48, 48]}, "data.size"),
        ({**PROMPTS, "policy__model": {"kind": "flux", "path": "x", "size": [64, 64], "dtype": "float16"}}, "policy.model.dtype"),
        ({**FOLDER, "data__held_out": 0}, "data.held_out"), ({**FOLDER, "eval__split": "train"}, "eval.split"),
        ({**PROMPTS, "policy__model": {"kind": "sd3", "path": "x", "size": [64, 64], "guidance": 3.5}}, "policy.model.guidance"),
        ({**PROMPTS, "policy__model": {"kind": "flux-fill", "path": "x"}}, "data.kind"),
        ({**PROMPTS, "policy__model": {"kind": "flux-kontext", "path": "x"}}, "data.kind"),
        ({"policy__model": {"kind": "flux-fill", "path": "x"}}, "data.kind"),
        ({**TRIPLETS, "policy__model": {"kind": "flux", "path": "x", "size": [64, 64]}}, "data.kind"),
        ({"trackers": ["wandb", "wandb"]}, "trackers"), ({"minibatches": 7}, "minibatches"),
        ({"samples": {"tokens": True}}, "samples.tokens"),
    ],
)  # fmt: skip
def test_incompatible_values_are_rejected_with_an_explanation(changes, key):
    found = [line for line in raised(**changes) if line.startswith(f"{key}: ")]
    assert found
    assert len(found[0].removeprefix(key)) > 30


@pytest.mark.parametrize(
    "changes",
    [
        {"passes": 1.5, "steps": None},
        {"steps": None, "phases": [{"name": "a", "steps": 0}, {"name": "b", "steps": 3}], "optimizer": {"warmup_steps": 2}},
        {"group_size": 1, "advantage": {"kind": "batch"}},
        {"group_size": 1, "advantage": {"kind": "gae", "gamma": 0.99, "lam": 0.95, "head": {"clip": None}}},
        {"advantage": {"kind": "gae"}, "steps": None,
         "phases": [{"name": "a", "steps": 2, "objective": {"kind": "supervised"}}, {"name": "b", "steps": 2}]},
        {"group_size": 1, "objective": {"kind": "supervised"}},
        {"objective": {"kind": "nft"}, "rollout": {"num_steps": 1, "transition": {"kind": "ode"}}},
        {"objective": {"kind": "policy_gradient", "surrogate": "reinforce"}, "policy__train__dropout": 0.1},
        {"objective": {"kind": "policy_gradient", "surrogate": "cispo", "clip_high": 1e-5}},
        {"rollout__reduction": "sum", "objective__clip_low": 0.2, "objective__clip_high": 0.3},
        {"objective__kl": {"kind": "velocity", "weight": 0.1}},
        {**FOLDER, "policy__model__size": [48, 48]},
        {**FOLDER, "data__held_out": 0, "eval__split": "train"},
        {**PROMPTS, "policy__model": {"kind": "flux", "path": "x", "size": [64, 64]}},
        {**FOLDER, "policy__model": {"kind": "flux", "path": "x", "size": [64, 64], "guidance": 0.0}},
        {**TRIPLETS, "policy__model": {"kind": "flux-fill", "path": "x"}},
        {**TRIPLETS, "policy__model": {"kind": "flux-kontext", "path": "x", "guidance": 2.5}},
        {**FOLDER, "policy__model": {"kind": "flux-fill", "path": "x", "size": [64, 64], "guidance": 30.0}},
    ],
)  # fmt: skip
def test_compatible_values_are_accepted(changes):
    assert parse(changed(**changes)).name == "try"


def test_a_schedule_warms_up_for_a_number_or_a_share_of_steps_and_ends_at_its_final_share():
    """The formula of transformers' cosine_with_min_lr; without a share, schedules end at 0."""
    for schedule in ("cosine", "linear"):
        keys = {"schedule": schedule, "warmup_steps": 2}
        to_a_tenth = Optimizer(**keys, final_share=0.1).learning_rate(peak=2.0, steps=range(10, 22))
        to_zero = Optimizer(**keys).learning_rate(peak=2.0, steps=range(10, 22))
        assert [to_a_tenth(step) for step in (10, 11, 12, 17, 22)] == pytest.approx([1.0, 2.0, 2.0, 2.0 * 0.55, 0.2])
        assert [to_zero(step) for step in (12, 17, 22)] == pytest.approx([2.0, 1.0, 0.0])
    share = Optimizer(warmup_steps=0.1)
    rates = share.learning_rate(peak=2.0, steps=range(10, 55))
    assert [share.warmup_of(steps) for steps in (1, 2, 20, 45)] == [1, 1, 2, 5]
    assert [Optimizer(warmup_steps=part).warmup_of(100) for part in (0.07, 0.28, 0.55, 0.551)] == [7, 28, 55, 56]
    assert [rates(step) for step in range(10, 16)] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    for whole in (0, 1, 5):
        kept = parse(changed(optimizer={"warmup_steps": whole})).optimizer
        assert kept.warmup_of(45) == whole
        assert json.dumps(kept.model_dump(mode="json")["warmup_steps"]) == str(whole)
    assert parse(changed(steps=1, optimizer={"warmup_steps": 0.5})).document()["optimizer"]["warmup_steps"] == 0.5
    (line,) = raised(optimizer={"warmup_steps": 2.5})
    assert line == "optimizer.warmup_steps: give a whole number of steps, or a share of the phase's steps below 1"


def test_a_phase_overrides_top_level_values():
    warm_up = {
        "name": "warm-up", "steps": 5, "objective": {"kind": "supervised"}, "learning_rate": 1e-3, "group_size": 1,
        "tasks_per_step": 64,
    }  # fmt: skip
    learn = {"name": "learn", "passes": 0.5, "keep_optimizer": True}
    first, second = parse(changed(steps=None, phases=[warm_up, learn])).resolved_phases()
    assert (first.objective.kind, first.learning_rate, first.rows) == ("supervised", 1e-3, 64)
    assert (second.objective.kind, second.learning_rate, second.rows, second.keep_optimizer) == ("policy_gradient", 1e-4, 24, True)
    assert second.total_steps(tasks=100) == 13  # half of 100 tasks, 4 a step, rounded up


def test_held_out_tasks_are_from_the_test_split_of_the_playground():
    data = parse(changed(eval={"tasks": 7, "seed": 5, "complexity": {"3": 1}})).eval_data()
    assert (data.count, data.seed, data.split, data.complexity, data.kind) == (7, 5, "test", {3: 1.0}, "playground")
    assert parse(BASE).eval_data().complexity == {2: 1.0, 3: 1.0}


def test_rows_or_compared_groups_that_do_not_divide_over_ranks_and_minibatches_raise_with_valid_values():
    warm_up = {"name": "warm-up", "steps": 5, "objective": {"kind": "supervised"}, "tasks_per_step": 64, "group_size": 1}
    recipe = parse(changed(steps=None, phases=[warm_up, {"name": "learn", "steps": 5}], minibatches=2))
    check_ranks(recipe, 4)  # 64 rows, then 24
    with pytest.raises(ValueError, match="24 rows do not divide over 8 ranks in 2 minibatches: use tasks_per_step 8, 16"):
        check_ranks(recipe, 8)
    learning = {"objective": {"kind": "dpo"}, "rollout": {"num_steps": 4, "transition": ODE}, "tasks_per_step": 4, "group_size": 4}
    check_ranks(parse(changed(**learning, minibatches=2)), 2)
    split = "4 groups do not divide over 2 minibatches on 4 ranks, and all samples of a group must be in one minibatch"
    with pytest.raises(ValueError, match=f"^tasks_per_step: {split}; use a multiple of 8$"):
        check_ranks(parse(changed(**learning, minibatches=2)), 4)
    (line,) = raised(**learning, minibatches=8)
    assert line.startswith("minibatches: tasks_per_step: 4 groups do not divide over 8 minibatches on 1 ranks")


def test_a_run_can_resume_with_another_length_device_or_folder_and_other_changed_keys_are_reported():
    old = parse(changed(**FOLDER))
    new = changed(
        **FOLDER, steps=99, data__path="elsewhere", out="other", device="cpu", trackers=["wandb"], eval={"every": 3},
        samples={"every": 1, "tasks": 2}, checkpoints={"every": 1, "keep": 9},
    )  # fmt: skip
    assert differences(old, parse(new)) == differences(old, parse(changed(**FOLDER, steps=None, passes=2.0))) == []
    other = changed(learning_rate=2e-4, eval={"tasks": 3}, data__complexity=[2], objective={"kind": "nft"})
    assert set(differences(parse(BASE), parse(other))) >= {
        "learning_rate: 0.0001 in the run, 0.0002 in the recipe", "eval.tasks: 64 in the run, 3 in the recipe",
        "data.complexity.3: 1.0 in the run, (nothing) in the recipe",
        "objective.kind: policy_gradient in the run, nft in the recipe",
    }  # fmt: skip

    def phased(first, second):
        return parse(changed(steps=None, phases=[{"name": "a", "steps": first}, {"name": "b", "steps": second}]))

    assert differences(phased(2, 2), phased(2, 9)) == []
    assert differences(phased(2, 2), phased(3, 2)) == ["phases.0.steps: 2 in the run, 3 in the recipe"]


def test_override_values_are_json_else_text_and_set_list_entries_and_missing_keys():
    for text, value in (
        ("3", 3), ("1e-4", 1e-4), ("true", True), ("null", None), ("[1, 2]", [1, 2]), ('"3"', "3"), ("a b", "a b"), ("", ""),
        ("NaN", "NaN"),
    ):  # fmt: skip
        assert value_of(text) == value
        assert type(value_of(text)) is type(value)
    document = {"phases": [{"steps": 1}, {"steps": 2}], "ema": None}
    made = apply(document, ["phases.1.steps=5", "ema.decay=0.9", "a.b.c=x=y"])
    assert made == {"phases": [{"steps": 1}, {"steps": 5}], "ema": {"decay": 0.9}, "a": {"b": {"c": "x=y"}}}
    assert document == {"phases": [{"steps": 1}, {"steps": 2}], "ema": None}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("steps", "some.key=value"), ("=3", "some.key=value"), ("a..b=3", "some.key=value"),
        ("phases.2.steps=3", "phases is a list, and '2' is not the number of an entry .0 to 1."),
        ("phases.x=3", "phases is a list, and 'x' is not the number of an entry"),
        ("phases.-1=3", "phases is a list, and '-1' is not the number of an entry"), ("none.0=3", "it is empty"),
        ("steps.x=3", "steps is 4, which has no keys"), (r'name="\ud800"', r'--set .name="\\\\ud800".: not UTF-8 text'),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_set_is_refused(override, says):
    with pytest.raises(ValueError, match=says):
        apply({"steps": 4, "phases": [{}, {}], "none": []}, [override])


def test_overrides_of_unknown_keys_too_large_numbers_and_one_text_are_refused():
    for overrides, says in (
        (["reward.combine.overall=1e999"], r"^reward\.combine\.overall: should be a finite number, not inf$"),
        (["polcy.train.rank=3"], r"^polcy: unknown key; did you mean policy\?$"),
        ("steps=2", r"overrides: 'steps=2' is a text; give a list: \['steps=2'\]"),
    ):
        with pytest.raises(ValueError, match=says):
            parse(BASE, overrides)


HERE = PlannedDevice("cpu", 1, torch.device("cpu"))


def recipe(*changes):
    return parse(apply(SMALL, changes))


def test_kernels_may_change_when_a_run_resumes_and_a_deterministic_run_rejects_other_attention():
    other = recipe("policy.attention=native", "policy.compile=regional", "optimizer.fused=always")
    assert differences(recipe(), other) == []
    assert (recipe().optimizer.options.get("fused"), other.optimizer.options["fused"]) == (None, True)
    used = other.policy.for_inference()
    assert (getattr(used, "attention", "none"), used.compile) == (None, None)
    recipe("deterministic=true", "policy.attention=_native_flash")
    with pytest.raises(ValueError, match=r"policy\.attention: whether flash is deterministic is not known; use null"):
        recipe("deterministic=true", "policy.attention=flash")


@pytest.mark.parametrize(("name", "status"), [("native", "ok"), ("sage", "FAILED")])
def test_the_doctor_tries_the_attention_backend(name, status):
    (finding,) = check_kernels(recipe(f"policy.attention={name}"), HERE)
    assert (finding.subject, finding.status) == ("kernels", status)
    assert f"policy.attention{' ' if status == 'ok' else ': '}{name}" in finding.text
    if status == "FAILED":
        assert "_native_math" in finding.text
        assert finding.fix == "--set policy.attention=null"
    (planned,) = check_kernels(recipe(f"policy.attention={name}"), PlannedDevice("h100", 1, None))
    assert "not tried, because h100 is not in this machine" in planned.text
    assert list(check_kernels(recipe(), HERE)) == []


def test_point_2_4_cudnn_attention_is_used_only_if_the_recipe_names_it():
    for find in (lambda: find_device("cpu"), scoring_device, lambda: init_distributed_from_recipe(recipe())):
        torch.backends.cuda.enable_cudnn_sdp(True)
        find()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    (finding,) = check_kernels(recipe("policy.model.dtype=bfloat16"), PlannedDevice("h100", 1, None))
    assert "torch's FlashAttention, and memory-efficient attention where there is a mask; cuDNN's" in finding.text
    (named,) = check_kernels(recipe("policy.attention=_native_cudnn"), PlannedDevice("h100", 1, None))
    assert "policy.attention _native_cudnn: not tried" in named.text


@torch.no_grad()
def test_vae_slicing_and_tiling_keys_configure_the_autoencoder():
    options: dict[str, Any] = {"kind": "sd3", "path": "folder"}
    whole, sliced = tiny_models.sd3_vae(), tiny_models.sd3_vae()
    SD3Model(**options, vae_slicing=True).limit_vae(sliced)
    assert (sliced.use_slicing, sliced.use_tiling) == (True, False)
    latents = torch.randn(3, 16, 4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(sliced.decode(latents).sample, whole.decode(latents).sample, rtol=0, atol=1e-5)
    SD3Model(**options, vae_tiling=True).limit_vae(whole)
    assert (whole.use_slicing, whole.use_tiling) == (False, True)
    assert not {"vae_slicing", "vae_tiling"} & SD3Model(**options).model_dump().keys()


def test_a_recipe_has_values_for_each_card_and_the_users_values_hold():
    cards = {"16gb": {"microbatch": 1, "rollout.chunk": 2}, "24gb": {"microbatch": 4, "tasks_per_step": 4}}
    made = partial(parse, {**SMALL, "cards": cards, "card": "24gb"})
    assert (made().microbatch, made().tasks_per_step, made(["microbatch=2"]).microbatch) == (4, 4, 2)
    small = made(["card=16gb"])
    assert (small.microbatch, small.rollout.chunk, small.tasks_per_step) == (1, 2, SMALL["tasks_per_step"])
    assert not {"card", "cards"} & small.document().keys()
    with pytest.raises(ValueError, match="card: '8gb'; this recipe has values for 16gb, 24gb"):
        made(["card=8gb"])
