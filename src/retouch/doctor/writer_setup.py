"""Rows and tokens on one rank of a recipe with a language-model policy, as input of its memory plan."""

from typing import Any

from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.phases import copies_in_cpu_memory, copies_needed
from retouch.doctor.memory import copies_on_device
from retouch.doctor.rows import held_out_rows, rank_rows, tasks_of, trial_rows
from retouch.memory.plan import LoraShape
from retouch.memory.tokens import WriterSetup
from retouch.models import train as recipe_train
from retouch.models.base import DiffusersModel
from retouch.models.language import PretrainedLanguageModel
from retouch.models.shapes import ImageBatch, PartConfigs
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.recipe.policy import AutoregressivePolicyKeys
from retouch.recipe.recipe import Recipe


def writer_setup(recipe: Recipe, policy: AutoregressivePolicyKeys, described: PartConfigs) -> WriterSetup:
    """How the language model is used and trained on one rank."""
    rollouts = [phase.rollout for phase in recipe.resolved_phases() if isinstance(phase.rollout, TokenRollout)]
    share = rank_rows(recipe)
    update = min(recipe.microbatch, max(1, share // recipe.minibatches))
    chunk = min(max(rollout.chunk for rollout in rollouts), share)
    model, train = policy.model, policy.train
    assert isinstance(model, PretrainedLanguageModel)
    dtype, trained_dtype = DTYPES[model.dtype], DTYPES[train.trained_dtype(model.dtype)]
    completion = max(rollout.max_new_tokens for rollout in rollouts)
    return WriterSetup(
        lora=LoraShape(train.rank, tuple(lora_targets(policy))) if isinstance(train, recipe_train.Lora) else None,
        prompt=_prompt_tokens(recipe, model, described),
        completion=min(completion, model.longest_completion(described) or completion),
        update=(tasks_of(recipe, update), update),
        trial=trial_rows(recipe, update),
        rollout=(tasks_of(recipe, chunk), chunk),
        evaluation=held_out_rows(recipe),
        logits_at_once=policy.logits_at_once,
        dtype=dtype,
        trained_dtype=trained_dtype,
        copies=copies_on_device(recipe, trained_dtype),
        offload_reference="reference" in copies_needed(recipe) & copies_in_cpu_memory(recipe),
        moments=recipe.optimizer.moments,
        gradient_checkpointing=policy.gradient_checkpointing,
        attention=model.attention,
        grammar_sets=model.vocabularies,
        ranks=recipe.ranks or 1,
        sharding="replicated" if recipe.sharding is None else "zero2" if recipe.sharding == "zero2" else "fsdp2",
        weights_on_cpu=recipe.devices is not None and recipe.devices.weights == "cpu",
    )


def _prompt_tokens(recipe: Recipe, model: PretrainedLanguageModel, described: PartConfigs) -> int:
    """Tokens of a prompt, including those of the source image if the policy writes for an image editor."""
    editor = None if recipe.renderer is None or not recipe.renderer.responses_at_once else recipe.renderer.image_model
    image_tokens = editor.condition_tokens(described) if isinstance(editor, DiffusersModel) else 0
    return model.prompt_tokens(described, image_tokens=image_tokens)


def image_batch(recipe: Recipe, model: DiffusersModel, setup: WriterSetup) -> ImageBatch:
    """How the renderer's image model samples on one rank."""
    assert recipe.renderer is not None
    return ImageBatch(
        rows=min(recipe.renderer.batch, max(rank_rows(recipe), held_out_rows(recipe))),
        size=model.size or model.planned_size,
        source=model.source_size,
        sources=int(recipe.renderer.uses_sources and model.takes.images[1] > 0),
        text=model.text_tokens or setup.prompt + setup.completion,
        dtype=DTYPES[model.dtype],
    )


def codes_setup(recipe: Recipe, model: PretrainedLanguageModel) -> dict[str, Any]:
    """Number of images decoded from codes at once (``decoded``) and encoded to codes at once (``encoded``), and their ``size``, (h,
    w) px."""
    assert recipe.renderer is not None
    rows = max(rank_rows(recipe), held_out_rows(recipe))
    chunks = [phase.rollout.chunk for phase in recipe.resolved_phases() if isinstance(phase.rollout, TokenRollout)]
    tokenized = recipe.data.contents().tokens
    encoded = 1 if tokenized else max(tasks_of(recipe, min(max(chunks), rank_rows(recipe))), held_out_rows(recipe))
    return {"decoded": min(recipe.renderer.batch, rows), "encoded": encoded, "size": model.planned_size}
