"""Configuration files of EARL (github.com/saba96/EARL), read as recipes. ``recipes/lib/earl_config.libsonnet`` has the mapping.

Every key of a configuration has an effect, is named as one that has none here, or is refused.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from retouch.config.imports import did_you_mean
from retouch.config.packaged import packaged_recipes
from retouch.recipe.document import evaluate_jsonnet

_REQUIRED = (
    *("train_paths_file", "base_exp_dir", "run_name", "model_path", "tokenizer_path", "assistant_prefill"),
    *("learning_rate", "num_iterations", "kl_coeff", "per_device_batch_size", "episodes_per_iteration", "generations_per_sample"),
    *("max_response_tokens", "reward_function_api_base", "reward_function_api_model_name", "reward_final_reward"),
)
_OPTIONAL = (
    *("coefficients", "val_paths_file", "val_coefficients", "temperature", "top_p", "top_k", "random_seed"),
    *("emu3_use_logit_processor", "separate_language_and_vision_vocabs", "reward_compute_viescore", "reward_compute_ground_score"),
    *("log_episodes_every_n_iterations", "keep_checkpoints_every_n_iterations", "save_checkpoints_every_n_iterations"),
    *("push_to_hub_every_n_iterations", "push_to_hub_repo_id"),
)
_WITHOUT_EFFECT = {
    **dict.fromkeys(("model_context_size", "max_prompt_len", "max_completion_len"), "prompts are never truncated"),
    "vllm_gpu_memory_utilization": "without rollout.engine the policy itself samples; a vLLM server has its own option",
}
_REFUSED = {
    "model_revision": "download this revision and set model_path to its folder",
    "train_text_tokens_only": "remove it, and add --set objective.tokens=text",
    "train_vision_tokens_only": "remove it, and add --set objective.tokens=vision",
    **dict.fromkeys(
        ("train_text_tokens_only_cycle_steps", "train_vision_tokens_only_cycle_steps", "text_only_steps"),
        "remove it, and set objective.tokens.text_steps and objective.tokens.vision_steps",
    ),
}
_TOKENIZERS = {"BAAI/Emu3-Gen": "Emu3-community/Emu3-Gen-hf"}
"""The same tokenizer, without the Python code in its repository."""
_PREFILLS = {"<|image start|>": False, " Let's think step by step. <|start thinking|>": True}
_COMPUTED = {
    "viescore": ("reward_compute_viescore",),
    "ground_score": ("reward_compute_ground_score",),
    "sqrt(viescore_pqxground_score)": ("reward_compute_viescore", "reward_compute_ground_score"),
}


def recipe_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe's document, and a line for each key without effect. Raises ValueError with a line for each key that is unknown,
    missing or refused, and for each value that has no counterpart."""
    given = {key: value for key, value in config.items() if value is not None}
    if "reward_function_model_name" in given:  # its name in another version of EARL
        given.setdefault("reward_function_api_model_name", given.pop("reward_function_model_name"))
    if problems := list(_problems(given)):
        raise ValueError("\n".join(problems))
    notes = [f"{key} has no effect: {why}" for key, why in _WITHOUT_EFFECT.items() if key in given]
    if (instead := _TOKENIZERS.get(given["tokenizer_path"])) is not None:
        notes.append(f"tokenizer_path: {instead} is the same tokenizer without Python code, and takes its place")
        given["tokenizer_path"] = instead
    lib = packaged_recipes() / "lib" / "earl_config.libsonnet"
    found: dict[str, Any] = json.loads(evaluate_jsonnet(lib, folders=[], variables={"CONFIG": json.dumps(given)}))
    return found, notes


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    known = (*_REQUIRED, *_OPTIONAL, *_WITHOUT_EFFECT)
    for key, value in given.items():
        if key in _REFUSED:
            # False is EARL's default of these flags.
            if value is not False:
                yield f"{key}: {_REFUSED[key]}"
        elif key not in known:
            yield f"{key}: EARL's configurations have no such key{did_you_mean(key, known)}"
    missing = [key for key in _REQUIRED if key not in given]
    yield from (f"{key}: missing in this configuration of EARL" for key in missing)
    if missing:
        return
    if not given["train_paths_file"]:
        yield "train_paths_file: the list is empty; name the lists of the training data (.../feature/list/tokenized_datalist.json)"
    if given["assistant_prefill"] not in _PREFILLS:
        yield f"assistant_prefill: {given['assistant_prefill']!r} is none of EARL's: {', '.join(map(repr, _PREFILLS))}"
    episodes, group = given["episodes_per_iteration"], given["generations_per_sample"]
    if not (isinstance(episodes, int) and isinstance(group, int) and group > 0 and episodes % group == 0):
        yield f"episodes_per_iteration: {episodes} is not a multiple of generations_per_sample ({group})"
    masked, separate = (given.get(key, True) for key in ("emu3_use_logit_processor", "separate_language_and_vision_vocabs"))
    if masked != separate:
        yield (
            "separate_language_and_vision_vocabs: it must equal emu3_use_logit_processor, because tokens are evaluated under the "
            "grammar under which they were sampled"
        )
    final = given["reward_final_reward"]
    if final not in _COMPUTED:
        yield f"reward_final_reward: {final!r} is none of {', '.join(_COMPUTED)}"
    yield from (f"{key}: {final} needs it; set it to true" for key in _COMPUTED.get(final, ()) if given.get(key, True) is False)
