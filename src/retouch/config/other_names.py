"""The arguments of TRL's GRPOConfig and GRPOTrainer that have another name here, for messages about unknown keys.

A test compares them with the table in docs/coming-from.md. Names that a recipe has too, such as ``weight_decay``, are not here.
"""

from collections.abc import Mapping

_BATCH = ("tasks_per_step, microbatch", "tasks_per_step=8, microbatch=4")
TRL: Mapping[str, tuple[str, str]] = {
    "num_generations": ("group_size", "group_size=8"),
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "num_train_epochs": ("passes", "passes=3.0"),
    "max_steps": ("steps", "steps=300"),
    "num_iterations": ("epochs", "epochs=1"),
    "steps_per_generation": ("minibatches", "minibatches=1"),
    "max_completion_length": ("rollout.max_new_tokens", "rollout={'kind': 'tokens', 'max_new_tokens': 256}"),
    "temperature": ("rollout.temperature", "rollout={'kind': 'tokens', 'max_new_tokens': 256, 'temperature': 0.7}"),
    "top_p": ("rollout.top_p", "rollout={'kind': 'tokens', 'max_new_tokens': 256, 'top_p': 0.9}"),
    "top_k": ("rollout.top_k", "rollout={'kind': 'tokens', 'max_new_tokens': 256, 'top_k': 50}"),
    "use_vllm": (
        "rollout.engine",
        "rollout={'kind': 'tokens', 'max_new_tokens': 256, 'engine': {'kind': 'vllm', 'url': 'http://127.0.0.1:8000'}}",
    ),
    "beta": ("objective.kl.weight", "objective=retouch.GRPO(kl=0.04)"),
    "epsilon": ("objective.clip_low, objective.clip_high", "objective=retouch.GRPO(clip=0.2)"),
    "epsilon_high": ("objective.clip_high", "objective=retouch.PolicyGradient(clip_low=0.2, clip_high=0.28)"),
    "delta": ("objective.dual", "objective=retouch.GRPO(dual=4.0)"),
    "loss_type": ("objective.normalise", "objective=retouch.GRPO(normalise='token')"),
    "importance_sampling_level": ("objective.surrogate: gspo", "objective=retouch.GSPO(clip=3e-4)"),
    "scale_rewards": ("advantage.scale", "advantage=retouch.GroupAdvantage(scale='none')"),
    "reward_weights": ("reward.combine", "reward_weights=[0.6, 0.4]"),
    "model_name_or_path": ("policy.model.path", "model='Qwen/Qwen2.5-1.5B-Instruct'"),
    "bf16": ("policy.model.dtype", "dtype='bfloat16'"),
    "lora_r": ("policy.train.rank", "peft_config=retouch.Lora(rank=32, alpha=64)"),
    "lr_scheduler_type": ("optimizer.schedule", "optimizer={'schedule': 'cosine'}"),
    "save_steps": ("checkpoints.every, checkpoints.keep", "checkpoints={'every': 50, 'keep': 2}"),
    "eval_steps": ("eval.every", "eval={'every': 20}"),
    "report_to": ("trackers", "trackers=['wandb']"),
    "push_to_hub": ("push", "push={'repo': 'me/lora', 'every': 20}"),
    "output_dir": ("out, name", "output_dir='runs'"),
    "run_name": ("out, name", "run_name='mine'"),
    "logging_steps": ("", "every step is one line of metrics.jsonl"),
    "resume_from_checkpoint": ("", "a run with the same name continues from its last checkpoint"),
    "args": ("", "give the values of GRPOConfig as arguments, under the names of docs/coming-from.md"),
}
"""Name of TRL to the keys of a recipe, and the arguments of a ``Trainer``, with an example of their values. Without a key, the
second text says why none is needed."""


def hint(name: str, *, python: bool, inside: bool = False) -> str:
    """What is written for TRL's ``name``; empty for other names. ``inside``: the name was given to a section, such as GRPO."""
    keys, instead = TRL.get(name, ("", ""))
    if not keys or not python:
        return f"TRL's {name} is {keys}" if keys else instead
    if inside:
        own, _, arguments = instead.partition("(")
        instead = arguments.removesuffix(")") if own.startswith("objective=") else f"retouch.Trainer(..., {instead})"
    return f"for TRL's {name} write {instead}"
