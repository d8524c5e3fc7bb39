"""docs/coming-from.md: keys listed as ours exist, keys marked "not yet" do not, and every argument of the others has a row."""

import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from retouch.config.errors import alternatives, annotation_of, is_list, keys_of
from retouch.config.other_names import TRL
from retouch.recipe.document import value_of
from retouch.recipe.recipe import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
_FOUND = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
SECTIONS = {
    name: next(text for title, text in _FOUND.items() if title.startswith(start))
    for name, start in {
        **{"writer": "A TRL writer script", "ip-adapter": "An IP-Adapter trainer", "enhancer": "A prompt enhancer", "earl": "EARL"},
        "numbers": "Numbers that the documents print",
    }.items()
}

# The arguments of these systems, by their own names.
THEIRS = {
    "writer": "model_name_or_path bf16 use_peft lora_r lora_alpha lora_target_modules learning_rate num_generations n_evals "
    "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_completion_length temperature beta epsilon "
    "loss_type scale_rewards num_iterations gradient_checkpointing use_vllm reward_weights save_steps output_dir run_name seed "
    "report_to resume_from_checkpoint attn_implementation OPENAI_API_KEY",
    "ip-adapter": "--model_type --ocr_weight --vlm_weight --rl_warmup_steps --rl_per_prompt_stat_tracking --rl_num_inner_epochs",
    "enhancer": "model_name device max_new_tokens temperature enhance_prompt enhance_prompts_batch CLIPRewardCalculator",
    "earl": "train_paths_file coefficients val_paths_file val_coefficients base_exp_dir model_path model_revision tokenizer_path "
    "assistant_prefill random_seed max_prompt_len max_completion_len train_text_tokens_only train_vision_tokens_only "
    "train_text_tokens_only_cycle_steps train_vision_tokens_only_cycle_steps text_only_steps reward_function_model_name "
    "learning_rate num_iterations kl_coeff temperature per_device_batch_size episodes_per_iteration generations_per_sample "
    "max_response_tokens top_p top_k model_context_size vllm_gpu_memory_utilization emu3_use_logit_processor "
    "separate_language_and_vision_vocabs reward_function_api_base reward_function_api_model_name reward_compute_viescore "
    "reward_compute_ground_score reward_final_reward run_name log_episodes_every_n_iterations "
    "keep_checkpoints_every_n_iterations save_checkpoints_every_n_iterations push_to_hub_every_n_iterations push_to_hub_repo_id",
}


def rows(section):
    """The rows of the section's first table: theirs, ours, what differs."""
    table = SECTIONS[section][SECTIONS[section].index("| theirs | ours |") :].split("\n\n")[0]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return [(first.removeprefix("| "), ours, rest[0].removesuffix("|").strip()) for first, ours, *rest in lines[2:]]


def known(place):
    """Whether the schema has the key ("policy.train.rank"), and accepts the value if one is given ("rollout.chunk: 4")."""
    path, has_value, value = place.partition(": ")
    sections, fields = [Recipe], []
    for part in path.split("."):
        fields = [keys_of(section)[part] for section in sections if part in keys_of(section)]
        sections = [inner for field in fields if not is_list(field.annotation) for inner in alternatives(annotation_of(field))]
    return any(not has_value or takes(field.annotation, value_of(value)) for field in fields)


def takes(annotation, value):
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def test_known_accepts_existing_keys_and_values_and_rejects_others():
    assert known("policy.train.rank")
    assert known("policy.train.kind: lora")
    assert known("renderer.encoder: policy")
    assert not known("policy.train.kind: dora")
    assert not known("policy.train.ranks")
    assert not known("learning_rate.x")
    assert [known(f"group_size: {value}") for value in (8, "many")] == [True, False]


@pytest.mark.parametrize("section", THEIRS)
def test_every_argument_of_the_other_system_has_a_row(section):
    named = {name for theirs, _, _ in rows(section) for name in re.findall(r"`([^`]+)`", theirs)}
    named |= {name.split()[0] for name in named}
    assert set(THEIRS[section].split()) - named == set()


def test_the_hints_for_names_of_trl_are_those_of_the_table():
    ours = {name: places for theirs, places, _ in rows("writer") for name in re.findall(r"`([^`]+)`", theirs)}
    shown = {name: ", ".join(re.findall(r"`([^`]+)`", ours.get(name, ""))) for name in TRL}
    assert {name: keys for name, keys in shown.items() if name != "args"} == {
        name: keys for name, (keys, _, _) in TRL.items() if name != "args"
    }


@pytest.mark.parametrize("section", THEIRS)
def test_keys_listed_as_ours_exist_and_keys_marked_not_yet_do_not(section):
    for theirs, ours, why in rows(section):
        places = re.findall(r"`([^`]+)`", ours)
        if ours == "nothing":
            assert why, f"{theirs}: say why it needs no key"
        elif ours.startswith("not yet: "):
            assert len(places) == 1, theirs
            assert not known(places[0]), f"{places[0]} exists now: fill in the row of {theirs}"
        else:
            assert places, theirs
            assert re.sub(r"`[^`]+`|, ", "", ours) == "", f"{theirs}: {ours}"
            assert [place for place in places if not known(place)] == [], theirs


@pytest.mark.parametrize("section", THEIRS)
def test_keys_in_the_column_of_differences_exist(section):
    for theirs, _, why in rows(section):
        for place in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+(?:: [\w-]+)?)`", why):
            assert place.startswith("retouch.") or place.endswith((".jsonl", ".json")) or known(place), f"{theirs}: {place}"


@pytest.mark.parametrize("section", THEIRS)
def test_every_feature_lists_existing_test_files(section):
    table = SECTIONS[section][SECTIONS[section].index("| feature | works | how | checked by |") :].split("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(lines) > 5
    for feature, works, *how, checked in lines:
        assert works == "yes" or how[0], f"{feature}: say what is done instead"
        files = re.findall(r"`([^`]+)`", checked)
        assert files, feature
        assert [file for file in files if not (PAGE.parents[1] / file).is_file()] == [], feature


def table_of(section: str, header: str) -> list[list[str]]:
    table = SECTIONS[section][SECTIONS[section].index(header) :].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<= )\|(?= )", line.strip("|"))] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("section", THEIRS)
def test_a_command_for_the_users_own_files_is_run_by_the_test_that_its_row_names(section: str) -> None:
    for _, _, here, checked in table_of(section, "| your file | your command | here | run by |"):
        (file,) = re.findall(r"`([^`]+)`", checked)
        written = (PAGE.parents[1] / file).read_text(encoding="utf-8")
        for command in re.findall(r"`([^`]+)`", here):
            words = re.findall(r"^retouch (\w+)|^(retouch\.\w+)|([\w-]+/[\w-]+-published)|(--scores)|(score-server)", command)
            missing = [word for found in words for word in found if word and word.replace("launch", "train") not in written]
            assert not missing or not file.startswith("tests/systems"), f"{command}: {missing} not in {file}"


def test_every_printed_number_has_a_verdict_and_a_test_or_none_to_check() -> None:
    lines = table_of("numbers", "| number | where | ours | verdict | checked by |")
    assert len(lines) > 10
    for number, _, _, verdict, checked in lines:
        assert verdict, number
        files = re.findall(r"`([^`]+)`", checked)
        assert bool(files) != (checked == "-"), number
        assert [file for file in files if not (PAGE.parents[1] / file).is_file()] == [], number
