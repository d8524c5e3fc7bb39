"""The arguments of TRL's GRPOConfig and GRPOTrainer that have another name here, for messages about unknown keys.

A test compares them with the table in docs/coming-from.md. Names that a recipe has too, such as ``weight_decay``, are not here.
"""

from collections.abc import Mapping
from typing import Any

TRL: Mapping[str, tuple[str, str, Any]] = {
    "num_generations": ("group_size", "group_size", 8),
    "per_device_train_batch_size": ("microbatch", "microbatch", 4),
    "gradient_accumulation_steps": ("tasks_per_step", "tasks_per_step", 8),
    "generation_batch_size": ("tasks_per_step", "tasks_per_step", 8),
    "num_train_epochs": ("passes", "passes", 3.0),
    "max_steps": ("steps", "steps", 300),
    "num_iterations": ("epochs", "epochs", 1),
    "steps_per_generation": ("minibatches", "minibatches", 1),
    "max_completion_length": ("rollout.max_new_tokens", "rollout.max_new_tokens", 256),
    "temperature": ("rollout.temperature", "rollout.temperature", 0.7),
    "top_p": ("rollout.top_p", "rollout.top_p", 0.9),
    "top_k": ("rollout.top_k", "rollout.top_k", 50),
    "use_vllm": ("rollout.engine", "rollout.engine", {"kind": "vllm", "url": "http://127.0.0.1:8000"}),
    "lr": ("learning_rate", "learning_rate", 1e-4),
    "warmup_ratio": ("optimizer.warmup_steps", "optimizer.warmup_steps", 0.1),
    "adam_epsilon": ("optimizer.eps", "optimizer.eps", 1e-8),
    "lr_scheduler_type": ("optimizer.schedule", "optimizer.schedule", "cosine"),
    "beta": ("objective.kl.weight", "objective.kl", 0.04),
    "epsilon": ("objective.clip_low, objective.clip_high", "objective.clip", 0.2),
    "epsilon_high": ("objective.clip_high", "objective.clip_high", 0.28),
    "delta": ("objective.dual", "objective.dual", 4.0),
    "loss_type": ("objective.normalise", "objective.normalise", "token"),
    "importance_sampling_level": ("objective.surrogate", "objective.surrogate", "gspo"),
    "scale_rewards": ("advantage.scale", "advantage.scale", "none"),
    "reward_weights": ("reward.combine", "reward_weights", [0.6, 0.4]),
    "model_name_or_path": ("policy.model.path", "model", "Qwen/Qwen2.5-1.5B-Instruct"),
    "bf16": ("policy.model.dtype", "dtype", "bfloat16"),
    "lora_r": ("policy.train.rank", "peft_config.rank", 32),
    "r": ("policy.train.rank", "peft_config.rank", 32),
    "lora_alpha": ("policy.train.alpha", "peft_config.alpha", 64),
    "lora_dropout": ("policy.train.dropout", "peft_config.dropout", 0.0),
    "lora_target_modules": ("policy.train.targets", "peft_config.targets", ["to_q", "to_v"]),
    "target_modules": ("policy.train.targets", "peft_config.targets", ["to_q", "to_v"]),
    "save_steps": ("checkpoints.every", "checkpoints.every", 50),
    "save_total_limit": ("checkpoints.keep", "checkpoints.keep", 2),
    "eval_steps": ("eval.every", "eval.every", 20),
    "eval_strategy": ("eval.every", "eval.every", 20),
    "report_to": ("trackers", "trackers", ["wandb"]),
    "push_to_hub": ("push", "push.repo", "me/lora"),
    "hub_model_id": ("push.repo", "push.repo", "me/lora"),
    "output_dir": ("out", "output_dir", "runs"),
    "run_name": ("name", "run_name", "mine"),
    "logging_steps": ("", "", "every step is one line of metrics.jsonl"),
    "logging_dir": ("", "", "leave it out: the files of TensorBoard are in the run's folder"),
    "max_prompt_length": ("", "", "leave it out: prompts are not cut"),
    "resume_from_checkpoint": ("", "", "a run with the same name continues from its last checkpoint"),
    "args": ("", "", "give the values of GRPOConfig as arguments, under the names of docs/coming-from.md"),
}
"""A name to the keys of a recipe that take its value, the argument of a ``Trainer`` with the field of a section, and a usual value.
Without a key, the last text says why none is needed."""

_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "bf16": {True: "bfloat16", False: "float32"},
    "use_vllm": {True: TRL["use_vllm"][2], False: None},
    "loss_type": {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "dr_grpo"},
    "importance_sampling_level": {"sequence": "gspo", "token": None},
    "scale_rewards": {True: None, "group": None, False: "none", "none": "none", "batch": "batch"},
    "eval_strategy": {"no": 0, "steps": 20, "epoch": 20},
    "report_to": {"none": [], "tensorboard": ["tensorboard"], "wandb": ["wandb"], "trackio": ["trackio"]},
    "push_to_hub": {True: "me/lora", False: None},
    "top_k": {0: None},
}
"""TRL's values that have another name here; None means that nothing has to be written."""
_OWNERS = {"r": "PEFT's r", "target_modules": "PEFT's target_modules", "lr": "lr"}
_REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "rollout": {"kind": "tokens", "max_new_tokens": 256},
    "peft_config": {"rank": 32},
}
_MADE = {"objective": "GRPO", "peft_config": "Lora", "advantage": "GroupAdvantage"}
IMAGE_CLIP = 1e-4
"""The usual clip range for images: their log-probabilities are means over a latent."""


def called(name: str) -> str:
    return _OWNERS.get(name, f"TRL's {name}")


def translated(name: str, value: Any) -> tuple[Any, bool]:
    """The value that ``name`` has here, None if nothing has to be written; and whether it is the value that the user gave. A value
    that cannot be meant becomes the usual one."""
    usual = TRL[name][2]
    if name in _VALUES and isinstance(value, str | int) and value in _VALUES[name]:
        return _VALUES[name][value], False
    numbers = (int, float) if isinstance(usual, float) else (type(usual),)
    fits = isinstance(value, numbers) and not isinstance(value, bool) and (isinstance(value, str | list) or value >= 0)
    return (value, True) if fits else (usual, False)


def place(name: str, given: Mapping[str, Any], *, writes: bool) -> tuple[str, Any, bool] | str:
    """What replaces ``name`` among the arguments ``given`` to a ``Trainer``: the argument with its field, the value, and whether it
    is the user's own; or the text that says why nothing does. ``writes``: the model writes tokens."""
    keys, path, usual = TRL[name]
    value, own = translated(name, given[name]) if keys else (None, False)
    if not keys:
        return str(usual)
    if path.startswith("rollout.") and not writes:
        return "leave it out: an image model writes no tokens"
    if path == "dtype" and hasattr(given.get("model"), "dtype"):
        return "leave it out: a loaded model has its own dtype"
    if value is None:
        return "leave it out: its value is the default here"
    if isinstance(given[name], str) and name in _VALUES and given[name] not in _VALUES[name]:
        return f"{called(name)} {given[name]!r} has another name here, or none; see docs/coming-from.md"
    if path.startswith("objective.clip") and not writes:
        return path, IMAGE_CLIP, True
    if path == "tasks_per_step":  # TRL counts completions
        sizes = {each: size for each, size in given.items() if isinstance(size, int)}
        one = sizes.get("per_device_train_batch_size", 1) * sizes.get("gradient_accumulation_steps", 1)
        groups = sizes.get("generation_batch_size", one) // sizes.get("num_generations", sizes.get("group_size", 8))
        return path, max(1, groups), True
    return path, value, own


def written(argument: str, fields: Mapping[str, Any]) -> str:
    """An argument of a ``Trainer`` as Python: ``group_size=8``, ``objective=retouch.GRPO(clip=0.2)``. ``fields``: of a section, or
    the value itself under the name ""."""
    if "" in fields:
        return f"{argument}={fields['']!r}"
    fields, made = {**_REQUIRED.get(argument, {}), **fields}, _MADE.get(argument)
    if made is None:
        return f"{argument}={fields!r}"
    if fields.pop("surrogate", "") == "gspo":
        made, fields = "GSPO", {"clip": 3e-4, **fields}
    return f"{argument}=retouch.{made}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def hint(name: str) -> str:
    """What a message about a recipe says of another trainer's ``name``; empty for other names."""
    keys, _, instead = TRL.get(name, ("", "", ""))
    return f"{called(name)} is {keys}" if keys else str(instead)


def hint_inside(name: str, value: Any, section: str) -> str:
    """What a message of the class ``section``, such as "Lora", says of ``name``; empty for other names."""
    if name not in TRL or isinstance(found := place(name, {name: value}, writes=True), str):
        return hint(name)
    argument, _, field = found[0].partition(".")
    made = _MADE.get(argument)
    if field == "surrogate" or section != ("PolicyGradient" if made == "GRPO" else made):
        return f"for {called(name)} write retouch.Trainer(..., {written(argument, {field: found[1]})})"
    images = f" for a language model, {field}={IMAGE_CLIP!r} for an image model" if field.startswith("clip") else ""
    return f"for {called(name)} write {field}={found[1]!r}{images}"
