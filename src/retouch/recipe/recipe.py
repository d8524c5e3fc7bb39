"""A recipe: the typed description of a run, read from Jsonnet or JSON.

It is checked as a whole before anything is loaded: its keys, its values, and how they fit together. Reading a recipe imports no
torch.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from retouch.config import consent
from retouch.config.imports import did_you_mean
from retouch.config.packaged import find
from retouch.config.section import LIVE
from retouch.data.base import StoredData
from retouch.data.tasks import check_arithmetic
from retouch.models.any_pipeline import DiffusersPipeline
from retouch.models.base import DiffusersModel, ImageModel, PretrainedLanguageModel
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.train import FullWeights, IpAdapter
from retouch.objectives.base import ObjectiveContext
from retouch.objectives.kinds import OBJECTIVES
from retouch.policies.rollout import TRUNCATE_AT, CachedEngine, DenoisingRollout, TokenRollout
from retouch.recipe import earl
from retouch.recipe.document import apply, evaluate, for_card, refuse_secrets, value_of
from retouch.recipe.keys import RecipeKeys, ResolvedPhase, Rollout, Watch
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.rewards.base import NoReward, PhaseFacts, RewardSection, RunFacts, TaskFacts
from retouch.rewards.combination import combination, read_formula

_log = logging.getLogger("retouch")


class Recipe(RecipeKeys):
    """The complete description of a run, whose keys have been checked against each other.

    Example::

        >>> retouch.Trainer.from_recipe("quickstart", ["steps=2"]).recipe.steps
        2
    """

    @model_validator(mode="after")
    def _checked(self) -> Self:
        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self


def parse(document: object, overrides: Sequence[str] = (), *, allow_imports: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a JSON document, changed by ``a.b=value`` overrides.

    ``allow_imports``: modules that the recipe may import, in addition to those that the overrides name and those that the user has
    allowed (``retouch.config.consent``). Raises ValueError with a line for each mistake: an unknown key (and what was probably
    meant), a value that is missing or wrong, values that contradict each other, or a class whose module is not allowed.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"a recipe is an object with keys, not a {type(document).__name__}")
    changed = for_card(document, overrides)
    with suppress(ValueError, TypeError, KeyError, AttributeError):  # a malformed recipe is refused below
        _complete(changed)
    typed = consent.named_in_words(overrides, value_of)
    with consent.reading(changed, source=document, allow=[*consent.module_names(allow_imports), *typed]):
        try:
            return Recipe.model_validate_json(json.dumps(changed))
        except RecursionError:
            raise ValueError("the recipe is nested too deeply") from None
        except ValidationError as error:
            from retouch.config.errors import mistakes

            raise mistakes(error, changed, Recipe) from None


def _complete(document: dict[str, Any]) -> None:
    """Add the guidance scale of the published model to each rollout and renderer that does not say one.

    Not to the rollouts of objectives that learn velocities: they learn the velocity without guidance.
    """
    policy, renderer = document["policy"], document.get("renderer")
    samplers: list[Any] = [(renderer, renderer)]
    phases = (
        (document, *(document.get("phases") or ())) if policy["kind"] == "denoising" else (document.get("text_to_image") or {},)
    )
    for phase in phases:
        objective = phase.get("objective") or document["objective"]
        if not getattr(OBJECTIVES.load(objective.get("kind")), "needs_velocities", False):
            samplers.append((phase.get("rollout"), policy if renderer is None else renderer))
    for sampler, owner in samplers:
        family = None if sampler is None or sampler.get("kind") == "tokens" else IMAGE_MODELS.load(owner["model"].get("kind"))
        if family is not None and issubclass(family, DiffusersModel):
            sampler.setdefault("guidance_scale", family.usual_settings(owner["model"].get("path", "")).guidance)


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_imports: Iterable[str] = ()) -> Recipe:
    """Read the recipe in a Jsonnet or JSON file, or the packaged recipe of that name, changed by ``a.b=value`` overrides.

    A configuration file of EARL is read as the recipe that does the same. ``allow_imports``: as in ``parse``.

    Raises ValueError if there is no such file (the message names packaged recipes with similar names), if the Jsonnet cannot be
    evaluated, if the recipe contains a secret of the environment, and for the mistakes that ``parse`` finds.
    """
    file = find(path)
    try:
        document = evaluate(file)
        if {"episodes_per_iteration", "generations_per_sample"} <= document.keys() and "policy" not in document:
            document, notes = earl.recipe_of(document)
            _log.warning("%s: read as a configuration of EARL%s", file, "".join(f"; {each}" for each in notes))
        refuse_secrets(apply(document, overrides), os.environ)
        return parse(document, overrides, allow_imports=allow_imports)
    except ValueError as error:
        raise ValueError(f"{file}:\n{error}") from None


def parts_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check that policy, rollouts and renderer fit together; if they do not, nothing else can be checked."""
    policy, renderer = recipe.policy, recipe.renderer
    tokens = policy.is_autoregressive
    if tokens and renderer is None:
        yield (
            'renderer: missing; a language-model policy needs one: {"kind": "response"} for an image editor, {"kind": "prompt"} '
            'for any image model, {"kind": "codes"} if the policy writes image tokens. A Trainer also takes the image model: '
            'renderer="stabilityai/stable-diffusion-3.5-medium". To train on rewards of text without making images, use TRL'
        )
    if not tokens and renderer is not None:
        yield "renderer: a denoising policy makes its own images; remove it, or use policy.kind autoregressive"
    images = policy.model.uses_image_tokens
    if tokens and renderer is not None and images is not None and images != (renderer.reads == "vision"):
        why = "writes image tokens: use renderer.kind codes" if images else "writes text, and codes are image tokens"
        yield f"renderer.kind: {policy.model.kind} {why}"
    for at, rollout in _rollouts(recipe):
        if tokens and not rollout.is_autoregressive:
            yield f'{at}.kind: missing; a language-model policy needs {{"kind": "tokens", "max_new_tokens": 100}}, not denoising'
        if not tokens and rollout.is_autoregressive:
            yield f"{at}.kind: 'tokens' is for language-model policies; remove it and set num_steps and transition"


def engine_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check that the engines can generate the samples that the policy learns from."""
    policy = recipe.policy
    for at, rollout in _rollouts(recipe):
        if isinstance(rollout, DenoisingRollout) and rollout.engine is not None and isinstance(policy, DenoisingPolicyKeys):
            yield from rollout.engine_problems(at, model=policy.model, train=policy.train)
        if not isinstance(rollout, TokenRollout) or rollout.engine is None or isinstance(policy, DenoisingPolicyKeys):
            continue
        full_weights, image_grammar = isinstance(policy.train, FullWeights), policy.model.image_grammar
        for problem in rollout.engine.problems(rollout, full_weights=full_weights, image_grammar=image_grammar):
            yield f"{at}.{problem}"


def text_to_image_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check that the renderer's image model can explore and train on the writer's samples."""
    trained, renderer = recipe.text_to_image, recipe.renderer
    assert trained is not None
    if renderer is None or not renderer.can_train:
        yield "text_to_image: only the image model of a renderer of kind prompt trains together with a writer; remove it"
        return
    objective, rollout, key = trained.objective, trained.rollout, "text_to_image.objective"
    learns = objective.uses_advantages and not objective.imitates and not objective.rewards
    if not learns or objective.compares_groups or objective.needs_initial_noise:
        yield f"{key}.kind: {objective.label} does not learn from the advantages of single samples; use policy_gradient, nft or awm"
    for name in ("engine", "staleness", "refill", "turns"):
        if getattr(rollout, name):
            yield f"text_to_image.rollout.{name}: the image model follows the rollout of its writer, in this process; remove it"
    if rollout.window.branches:
        yield "text_to_image.rollout.window: the samples of a group have different prompts, so they share no steps; use mode window"
    yield from rollout.problems("text_to_image.rollout")
    yield from recipe.advantage.problems(objective, objective_key=key, is_autoregressive=False)
    yield from objective.problems(
        ObjectiveContext(
            objective=key,
            rollout="text_to_image.rollout",
            model=recipe.image_model.kind,
            is_autoregressive=False,
            token_kinds=None,
            stochastic=rollout.transition.stochastic,
            noise_level=rollout.transition.exploration,
            reduction=rollout.reduction,
            actions=rollout.actions,
            microbatch=trained.microbatch,
            optimizer_steps=recipe.epochs * recipe.minibatches,
            lora_dropout=None if trained.train.lora is None else ("text_to_image.train.dropout", trained.train.lora.dropout),
            num_steps=rollout.num_steps,
        )
    )
    if getattr(recipe.image_model, "dtype", None) == "float16":
        yield "renderer.model.dtype: float16 cannot train, as most gradients would underflow to 0; use bfloat16 or float32"
    wrong = {
        f"sharding: {recipe.sharding} shards only the writer; set sharding to null, or remove text_to_image": (
            recipe.sharding is not None
        ),
        "advantage.kind: a value head predicts rewards for tokens only; use group or batch with text_to_image": (
            recipe.advantage.value_head is not None
        ),
        "devices.offload: an image model that trains stays on its device; remove it, or text_to_image": (
            recipe.devices is not None and bool(recipe.devices.offload)
        ),
    }
    yield from (why for why, found in wrong.items() if found)
    for at, each in _rollouts(recipe):
        for name in ("staleness", "refill", "turns"):
            if getattr(each, name):
                yield f"{at}.{name}: with text_to_image, all samples of a step are made in that step and once; remove one"


def base_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check that quantised weights are frozen, and that every part that handles them can."""
    policy = recipe.policy
    if policy.base is None or not any(bits for _, bits in policy.base):
        return
    key = "policy.base"
    if isinstance(policy.train, FullWeights):
        yield f"{key}: quantised weights cannot train; use policy.train.kind lora, or remove it"
    if not isinstance(policy.model, DiffusersModel | PretrainedLanguageModel):
        yield f"{key}: is only for models in the layout of a diffusers pipeline or of transformers; remove it"
    if str(getattr(policy.model, "path", "")).startswith(LIVE):
        yield f"{key}: a loaded model keeps its weights; load it quantised, or pass its folder or Hugging Face id"
    if recipe.devices is not None and recipe.devices.swap_blocks and getattr(policy.base, "quantize", None) == "4bit":
        # Its products keep their codes until the backward pass, past gradient checkpointing, so all blocks would be on the device.
        yield f"{key}.quantize: blocks in 4bit do not wait in CPU memory; use 8bit, or devices.swap_blocks 0"
    if recipe.sharding == "fsdp2":
        yield f"{key}: fsdp2 cannot shard quantised weights; use sharding null, as they are small, or remove it"
    if policy.compile is not None:
        yield f"{key}: quantised layers are not compiled; set policy.compile to null, or remove it"
    if any(not isinstance(rollout.engine, CachedEngine | None) for _, rollout in _rollouts(recipe)):
        yield f"{key}: an engine would sample with weights that are not quantised; remove it, or rollout.engine"
    if recipe.renderer is not None and recipe.renderer.kind == "response":
        yield f"{key}: the editor reads the writer's states, and was made for weights that are not quantised; remove it"


def image_model_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check the image model: the size of its images is known, its parts are known if some of them are moved off the device, it can
    train in its dtype, and it can render the output of the policy."""
    model = recipe.image_model
    if isinstance(recipe.policy, DenoisingPolicyKeys) and getattr(model, "dtype", None) == "float16":
        yield (
            "policy.model.dtype: float16 is only for frozen image models, as most gradients would underflow to 0; use bfloat16 or "
            "float32"
        )
    if isinstance(recipe.policy, DenoisingPolicyKeys) and not isinstance(model, DiffusersModel):
        known = "is only for models in the layout of a diffusers pipeline"
        if recipe.policy.prompt_embeddings == "cached":
            yield f"policy.prompt_embeddings: cached {known}; use live"
        for key in ("offload", "swap_blocks"):
            if getattr(recipe.devices, key, False):
                yield f"devices.{key}: it {known}; remove it"
    if isinstance(model, DiffusersPipeline):
        samplers = _rollouts(recipe) if recipe.renderer is None else [("renderer", recipe.renderer)]
        for key, sampler in samplers:
            if getattr(sampler, "guidance_scale", 1.0) != 1:
                yield f"{key}.guidance_scale: a pipeline guides by itself; use {recipe.image_model_key}.call.guidance_scale"
        if getattr(recipe.policy, "prompt_embeddings", "live") == "cached":
            yield "policy.prompt_embeddings: a pipeline keeps the embeddings of its last tasks itself; use live"
        if recipe.sharding == "fsdp2":
            yield "sharding: the ranks of fsdp2 must call the model equally often, which a pipeline does not ensure; use zero2"
    if recipe.renderer is not None and not isinstance(recipe.policy, DenoisingPolicyKeys):
        yield from recipe.renderer.problems(recipe.policy.model)


def source_image_problems(recipe: RecipeKeys, phase: ResolvedPhase, at: str) -> Iterator[str]:
    """Check that the tasks of a phase have the images that the model takes. ``at``: the key of the data section. If rows differ,
    each row is checked when it is read."""
    data, model = phase.data, recipe.image_model
    takes, size = model.takes, recipe.image_size
    has, own = data.contents(), data.image_size
    if has.tokens:
        if model.uses_image_tokens is False:
            yield f"{at}.kind: tokens are for a policy that generates image tokens, for example emu3, and not for {model.kind}"
        return
    if None not in (own, size) and own != size:
        yield f"{at}.size: {list(own or ())} and {recipe.image_model_key}.size: {list(size or ())} differ; set only one of them"
    if takes is None:
        return
    if has.images is False and takes.images[0] > 0:
        others = "triplets, folder or hub" if takes.mask else "folder or hub"
        lists = ", or add a column `image` to your rows" if data.label == "table" else ""
        yield f"{at}.kind: {data.label} have no source image, which {model.kind} edits; use {others} data{lists}"
    elif has.mask is False and takes.mask:
        yield f"{at}.kind: {data.label} has no masks, and {model.kind} takes {takes}; use triplets, folder or hub data"
    if has.images and not recipe.policy.is_autoregressive and takes.images[1] == 0:
        yield f"{at}.kind: {data.label} has source images, which {model.kind} does not take; use prompts, or folder or hub data"


def ip_adapter_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check that the model supports an IP-Adapter, and that the tasks have reference images."""
    train, model = recipe.policy.train, recipe.policy.model
    assert isinstance(train, IpAdapter)
    assert isinstance(model, ImageModel)
    if not model.ip_adapter_blocks:
        yield f"policy.train.kind: ip-adapter is for models of Flux and Qwen-Image, not for {model.kind}; use lora"
    elif train.blocks not in model.ip_adapter_blocks:
        yield "policy.train.blocks: Qwen-Image has only double blocks; use double"
    phases = recipe.resolved_phases()
    if train.dropout > 0 and not any(phase.imitates for phase in phases):
        yield "policy.train.dropout: it applies to supervised phases only, and there is none; use 0"
    for index, phase in enumerate(phases):
        at = recipe.phase_key(index, "data")
        if phase.data.contents().reference is not False:
            continue  # a row of a folder without a reference is reported when it is read
        if "columns" in type(phase.data).model_fields:
            yield f"{at}.columns: an IP-Adapter needs a reference image; name the column of `reference`"
        else:
            yield f"{at}.kind: {phase.data.label} have no reference image, which an IP-Adapter needs; use triplets, folder or hub"


def _rollouts(recipe: RecipeKeys) -> Iterator[tuple[str, Rollout]]:
    """Each rollout of the recipe with its key."""
    yield "rollout", recipe.rollout
    for index, phase in enumerate(recipe.phases or ()):
        if phase.rollout is not None:
            yield f"phases.{index}.rollout", phase.rollout


def rewards_of(recipe: RecipeKeys, phase: int | None = None) -> Iterator[tuple[str, RewardSection]]:
    """Yield each reward of a run, and the rewards nested in it, with their paths: the reward that is trained on, the held-out judge
    of ``watch``, and the rewards that objectives differentiate. ``phase``: as for `differentiated_rewards`."""
    sections = [("reward", recipe.reward)]
    if recipe.watch is not None and recipe.watch.judge is not None:
        sections.append(("watch.judge.reward", recipe.watch.judge.reward))
    for path, section in [*sections, *differentiated_rewards(recipe, phase)]:
        for inner, _, part in section.parts(path):
            yield inner, part


def differentiated_rewards(recipe: RecipeKeys, phase: int | None = None) -> Iterator[tuple[str, RewardSection]]:
    """Yield each reward that an objective differentiates, with its path. ``phase``: index of the only phase to include; None
    includes all."""
    for index, each in enumerate(recipe.resolved_phases()):
        if phase in (None, index):
            for key, section in each.objective.rewards.items():
                if isinstance(section, RewardSection):
                    yield f"{recipe.phase_key(index, 'objective')}.{key}", section


def reward_problems(recipe: RecipeKeys) -> Iterator[str]:
    """Check the reward, and the column that the evaluation reports."""
    if isinstance(recipe.reward, NoReward):
        yield from _problems_without_reward(recipe)
        return
    combined, columns = None, recipe.reward.known_columns()
    try:
        combine = recipe.reward.combine
        if not combine:
            raise ValueError('empty; name at least one column and its weight, for example {"overall": 1.0}')
        if columns is not None:
            combined = combination(combine, columns)
        elif isinstance(combine, str):  # the columns are not known yet, so only the syntax is checked
            read_formula(combine)
        elif not any(combine.values()):
            raise ValueError("all weights are 0, so nothing would be learned; set a weight for one column")
    except ValueError as error:
        yield f"reward.combine: {str(error).removeprefix('combine ').removeprefix('combine: ')}"
    if combined is not None and columns is not None and recipe.advantage.reads_scores:
        try:
            recipe.advantage.check_columns(columns, combined.columns)
        except ValueError as error:
            yield str(error)
    column = recipe.eval.column
    if columns is not None and column is not None and column not in columns and column not in evaluated_columns(recipe, ()):
        instead = did_you_mean(column, columns) or f"; it gives {', '.join(columns)}"
        yield f"eval.column: the reward gives no {column!r}{instead}"
    run = RunFacts(
        writes_text=recipe.policy.is_autoregressive,
        trained_columns=None if combined is None else combined.columns,
        eval_column=recipe.eval.column,
        phases=tuple(
            PhaseFacts(rows=phase.rows, group_size=phase.group_size, chunk=phase.rollout.chunk)
            for phase in recipe.resolved_phases()
        ),
    )
    yield from recipe.reward.problems("reward", "", run)


def _problems_without_reward(recipe: RecipeKeys) -> Iterator[str]:
    """Check that a run without a reward uses nothing that needs one."""
    give = "give a reward (reward_funcs of a Trainer)"
    sampling = [phase for phase in recipe.resolved_phases() if not phase.imitates]
    if sampling:
        learns = "learns from the rewards of its samples" if sampling[0].objective.uses_advantages else "has its samples scored"
        why = f"there is none, and {sampling[0].objective.label} {learns}"
        yield f"reward: {why}; {give}, or learn from pairs of the data with objective.kind dpo and objective.pairs data"
        return
    if recipe.heldout_objective is None:
        yield f"reward: there is none, and this run can only be evaluated by a reward; {give}"
        return
    columns = evaluated_columns(recipe, ())
    if recipe.eval.column is not None and recipe.eval.column not in columns:
        yield f"eval.column: without a reward, evaluation gives only {' and '.join(columns)}; name one of them, or {give}"
    need = {
        "reward.combine": recipe.reward.combine,
        "eval.best_of_k": recipe.eval.best_of_k,
        "eval.guided_k": recipe.eval.guided_k,
        "watch": recipe.watch,
    }
    for key, given in need.items():
        if given:
            yield f"{key}: it needs a reward, and there is none; remove it, or {give}"


def evaluated_columns(recipe: RecipeKeys, columns: Iterable[str]) -> list[str]:
    """The columns of an evaluation: ``columns`` of the reward, and the columns that an objective measures."""
    objective = recipe.heldout_objective
    return [*columns, *(() if objective is None else objective.heldout_columns)]


def watch_problems(watch: Watch, rewards: Iterable[RewardSection]) -> Iterator[str]:
    """Yield a line for each contradiction within ``watch``, and between ``watch`` and the ``rewards`` that are trained on."""
    if watch.canaries is not None and watch.canaries.count > watch.tasks:
        yield f"watch.canaries.count: {watch.canaries.count} exceeds watch.tasks ({watch.tasks}); use {watch.tasks} or fewer"
    if watch.judge is None:
        return
    heldout = watch.judge.reward
    if (columns := heldout.known_columns()) is not None:
        try:
            combination(heldout.combine, columns)
        except ValueError as error:
            yield f"watch.judge.reward.combine: {str(error).removeprefix('combine ')}"
            return
    if shared := _trained(heldout) & set().union(*map(_trained, rewards)):
        names = ", ".join(sorted({name for _, name in shared}))
        yield (
            f"watch.judge.reward: the run is trained on its columns {names}, so it is not held out; use another judge, or columns "
            "that are not trained on"
        )


def _trained(reward: RewardSection) -> set[tuple[str, str]]:
    """The columns that ``combine`` uses (all columns if it is empty, as in a reward that is differentiated), each with the JSON of
    the reward that computes it. If the columns are not known yet: the names in ``combine``."""
    columns = reward.known_columns()
    if columns is not None and not reward.combine:
        names = tuple(columns)
    elif columns is None:
        names = tuple(reward.combine) if isinstance(reward.combine, dict) else (reward.combine,)
    else:
        try:
            names = combination(reward.combine, columns).columns
        except ValueError:  # a problem of the reward itself
            names = ()
    rewards = [(prefix, part.model_dump_json(exclude={"combine", "max_missing"})) for _, prefix, part in reward.parts()]
    return {(own, name.removeprefix(prefix)) for prefix, own in rewards for name in names if name.startswith(prefix)}


ZERO3 = (
    "zero3 gathers the weights in every call of the model, and rollouts and renderers call the model or parts of it outside of "
    'the engine and not equally often on all ranks: they hang, or fail with "pop from an empty deque"'
)


def problems(recipe: RecipeKeys) -> list[str]:
    """A line for each contradiction between keys; empty for a valid recipe."""
    found = [*_length(recipe), *_outputs_and_devices(recipe)]
    if recipe.watch is not None:
        differentiated = [section for _, section in differentiated_rewards(recipe)]
        found += watch_problems(recipe.watch, [recipe.reward, *differentiated])
    if unlike := list(parts_problems(recipe)):
        return [*found, *unlike]
    found += [*reward_problems(recipe), *image_model_problems(recipe), *engine_problems(recipe), *base_problems(recipe)]
    if recipe.text_to_image is not None:
        found += text_to_image_problems(recipe)
    policy = recipe.policy
    if isinstance(policy, DenoisingPolicyKeys):
        if recipe.deterministic and policy.attention is not None and not policy.attention.lstrip("_").startswith("native"):
            found.append(f"policy.attention: whether {policy.attention} is deterministic is not known; use null, or native kernels")
    elif policy.compile is not None and not policy.gradient_checkpointing:
        found.append(
            "policy.compile: only layers that are recomputed in the update are compiled; set gradient_checkpointing, or use null"
        )
    if isinstance(policy.train, IpAdapter):
        found += ip_adapter_problems(recipe)
    found += _phases(recipe)
    if recipe.eval.guided_k and (policy.is_autoregressive or recipe.evaluates_in_turns):
        found.append("eval.guided_k: only a denoising policy can be guided by the reward, and not in turns; set it to 0")
    if recipe.evaluates_in_turns or any(phase.most_turns > 1 for phase in recipe.resolved_phases()):
        found += _turns(recipe)
    try:
        check_ranks(recipe, 1)  # more ranks are checked at the start of the run
    except ValueError as error:
        found.append(f"minibatches: {error}")
    return list(dict.fromkeys(found))


def check_ranks(recipe: RecipeKeys, world: int) -> None:
    """Raise ValueError, with legal numbers, if ``world`` ranks cannot divide the steps of some phase equally."""
    for phase in recipe.resolved_phases():
        check_arithmetic(
            tasks_per_step=phase.tasks_per_step, group_size=phase.group_size, minibatches=recipe.minibatches, world=world
        )
        parts = recipe.minibatches * world
        if phase.objective.compares_groups and phase.tasks_per_step % parts:
            pairs = phase.objective.needs_pairs
            groups, together = ("pairs", "both images of a pair") if pairs else ("groups", "all samples of a group")
            raise ValueError(
                f"tasks_per_step: {phase.tasks_per_step} {groups} do not divide over {recipe.minibatches} minibatches on {world} "
                f"ranks, and {together} must be in one minibatch; use a multiple of {parts}"
            )


def rank_count_warning(made_for: int, world: int) -> str:
    """The warning about a run with another number of ranks than its recipe is made for."""
    there = "is 1" if world == 1 else f"are {world}"
    return f"the recipe is meant for {made_for} rank{'s' * (made_for > 1)}, and there {there}"


def _length(recipe: RecipeKeys) -> Iterator[str]:
    if recipe.phases is None:
        if (recipe.steps is None) == (recipe.passes is None):
            yield f"steps: {_one_length(recipe.steps)}"
        return
    if not recipe.phases:
        yield "phases: the list is empty; add a phase, or set phases to null and set steps"
        return
    if recipe.steps is not None or recipe.passes is not None:
        key, value = ("steps", recipe.steps) if recipe.steps is not None else ("passes", recipe.passes)
        options = " or ".join(f"--set phases.{index}.{key}={value:g} ({each.name})" for index, each in enumerate(recipe.phases))
        yield (
            "steps: with phases, each phase has its own length; remove the top-level steps and passes, and set the length of a "
            f"phase: {options}"
        )
    names = [phase.name for phase in recipe.phases]
    for index, phase in enumerate(recipe.phases):
        if (phase.steps is None) == (phase.passes is None):
            yield f"phases.{index}.steps: {_one_length(phase.steps)}"
        if phase.name in names[:index]:
            yield f"phases.{index}.name: another phase is also called {phase.name!r}; names must be unique"
    if all(phase.steps == 0 for phase in recipe.phases):
        yield "phases: none of them has a step; set steps for one, or evaluate the untrained model with `retouch eval`"
    if recipe.phases[0].keep_optimizer:
        yield "phases.0.keep_optimizer: there is no phase before the first; remove it"


def _one_length(steps: int | None) -> str:
    """What to do about a run or a phase with both lengths, or with none (``steps`` is None)."""
    return "missing: set the length of the run, in steps or in passes" if steps is None else "set either steps or passes, not both"


def _outputs_and_devices(recipe: RecipeKeys) -> Iterator[str]:
    """Check the checkpoints, the uploads, the trackers, the optimizer and the devices of a run."""
    every, kept = recipe.checkpoints.every, recipe.checkpoints.keep_every
    if kept is not None and (every == 0 or kept % every):
        yield f"checkpoints.keep_every: {kept} is not a multiple of checkpoints.every ({every}), so none is kept; use a multiple"
    if recipe.push is not None and recipe.sharding == "fsdp2":
        yield "push: with fsdp2 no rank has the whole weights; train without push, then `retouch export` and `hf upload`"
    # The kinds of tokens of an imported model are not known.
    kinds = recipe.policy.token_kinds
    if recipe.samples.tokens and not (recipe.policy.is_autoregressive and (kinds is None or "text" in kinds)):
        yield "samples.tokens: this policy writes no text; remove it"
    if recipe.samples.states and recipe.policy.kind == "autoregressive":
        yield "samples.states: this policy has no denoising states; remove it"
    if len(set(recipe.trackers)) < len(recipe.trackers):
        yield "trackers: one tracker is listed twice; list each once"
    if recipe.sharding == "zero3":
        yield f"sharding: {ZERO3}; use zero2, or fsdp2 if the weights themselves are too large"
    if recipe.optimizer.final_share and recipe.optimizer.schedule == "constant":
        yield "optimizer.final_share: a constant learning rate does not fall; use schedule cosine or linear, or remove it"
    moments = recipe.optimizer.moments
    if moments is not None and recipe.sharding not in (None, *(["fsdp2"] if moments == "cpu" else [])):
        yield f"optimizer.moments: {moments} does not go with sharding {recipe.sharding}; remove it, or use cpu with fsdp2"
    devices = recipe.devices
    if devices is None:
        return
    if devices.policy is not None and recipe.device != "auto":
        yield f"device, devices.policy: {recipe.device} and {devices.policy} both choose the policy's device; set one of them"
    if recipe.renderer is None or recipe.renderer.image_model is None:
        keys = ("renderer",) if isinstance(recipe.policy, DenoisingPolicyKeys) else ("renderer", "offload")
        for key in keys:
            if getattr(devices, key):
                yield f"devices.{key}: this policy renders its images itself, on its own device; remove it"
    if devices.reference is not None and not (recipe.policy.kind == "autoregressive" and recipe.policy.train.kind == "full"):
        yield "devices.reference: only for full training of language models; the reference of a LoRA is small, so remove it"
    if devices.reference is not None and recipe.sharding == "fsdp2":
        yield "devices.reference: fsdp2 already shards the reference over ranks; use zero2, or remove it"
    if devices.swap_blocks:
        policy = recipe.policy
        wrong = {
            "only the transformer of a denoising policy has such blocks; remove it": policy.is_autoregressive,
            "only frozen weights can wait; use policy.train.kind lora, or remove it": policy.train.kind == "full",
            "without recomputation the backward pass keeps them on the device; set policy.gradient_checkpointing to true": (
                not policy.gradient_checkpointing
            ),
            "compiled blocks need their weights in one place; set policy.compile to null, or remove it": policy.compile is not None,
            f"it does not go with sharding {recipe.sharding}; set sharding to null, or remove it": recipe.sharding is not None,
        }
        yield from (f"devices.swap_blocks: {why}" for why, found in wrong.items() if found)
    if devices.weights is not None and recipe.sharding != "fsdp2":
        yield "devices.weights: only weights that are sharded by fsdp2 can wait in CPU memory; set sharding to fsdp2, or remove it"


def _phases(recipe: RecipeKeys) -> Iterator[str]:
    for index, phase in enumerate(recipe.resolved_phases()):
        at = {key: recipe.phase_key(index, key) for key in ("objective", "rollout", "data", "group_size")}
        yield from phase.objective.problems(_context(recipe, phase, at))
        tokens = phase.rollout.is_autoregressive
        yield from recipe.advantage.problems(phase.objective, objective_key=at["objective"], is_autoregressive=tokens)
        if phase.objective.needs_pairs:
            if phase.data.contents().pairs is False:
                why = f"{phase.data.label} has no columns `chosen` and `rejected`, which {at['objective']}.pairs 'data' compares"
                yield f"{at['data']}: {why}; name them in columns, or give folder, hub or table data that have them"
            if phase.group_size != 2:
                yield f"{at['group_size']}: {phase.group_size}, and a pair of the data has 2 images; set 2"
        elif phase.imitates:
            unused = {name: bool(getattr(phase.rollout, name)) for name in ("refill", "staleness", "turns")}
            for key in (key for key, is_set in unused.items() if is_set and recipe.phases is None):
                yield f"{at['rollout']}.{key}: {phase.objective.label} samples nothing; remove it"
            if phase.data.contents().target is False and phase.objective.needs_targets:
                has = f"{phase.data.label} have no targets"
                yield f"{at['data']}: {has}, and {phase.objective.label} needs them; use folder or hub data"
        else:
            # The samples of a group must be able to differ, and advantages to differ from 0.
            if not phase.objective.uses_advantages:
                pass
            elif phase.group_size < (smallest := recipe.advantage.smallest_group):
                nothing = f"{phase.group_size} gives every sample the advantage 0"
                yield f"{at['group_size']}: {nothing}; use {smallest} or more, or advantage.kind batch or gae"
            elif phase.rows < 2:
                yield "tasks_per_step: a step of one sample gives it the advantage 0; use more tasks or a larger group_size"
            yield from phase.rollout.problems(at["rollout"])
            if phase.objective.needs_acting_means and not phase.rollout.is_autoregressive and phase.rollout.engine is not None:
                why = "an engine does not return the means that ratio_norm and surrogate dppo need"
                yield f"{at['objective']}: {why}; use surrogate clip without ratio_norm, or remove {at['rollout']}.engine"
            if phase.rollout.staleness:
                yield from _staleness(recipe, phase, at)
            elif phase.rollout.truncate_at != TRUNCATE_AT:
                yield f"{at['rollout']}.truncate_at: has an effect only with staleness; set {at['rollout']}.staleness, or remove it"
            if phase.rollout.refill is not None:
                yield from _refill(recipe, phase, at)
        contents = phase.data.contents()
        tasks = TaskFacts(
            path=at["data"],
            kind=phase.data.label,
            has_source=contents.images is not False,
            has_target=contents.target is not False,
        )
        for path, part in rewards_of(recipe, index):
            yield from part.task_problems(path, tasks)
        yield from source_image_problems(recipe, phase, at["data"])
        yield from phase.data.problems(at["data"], eval_split=recipe.eval.split if index == 0 else None)
        if phase.passes is not None and not phase.data.has_length:
            yield f"{recipe.phase_key(index, 'passes')}: the number of rows of a stream is not known; give `steps` instead"
        warmup = recipe.optimizer.warmup_steps
        if phase.steps and warmup > phase.steps:
            yield (
                f"optimizer.warmup_steps: {warmup} exceeds the {phase.steps} steps of phase {phase.name!r}; give fewer steps, or a "
                "share of them below 1"
            )


def _staleness(recipe: RecipeKeys, phase: ResolvedPhase, at: dict[str, str]) -> Iterator[str]:
    """Check that the actions of stale rollouts can be weighted."""
    key, objective = f"{at['rollout']}.staleness", phase.objective
    if not objective.needs_log_probs:
        yield f"{key}: {objective.label} has no probabilities that stale samples could be weighted by; use 0, or policy_gradient"
    elif objective.one_ratio_per_row:
        yield f"{key}: the weights are those of single actions, and gspo has one ratio per row; use 0, or surrogate clip"
    if objective.needs_acting_means and not phase.rollout.is_autoregressive:
        why = "ratio_norm and surrogate dppo need the means under the weights that sampled"
        yield f"{key}: {why}; use 0, or surrogate clip without ratio_norm"
    if recipe.advantage.value_head is not None:
        yield f"{key}: the predictions of a value head would be stale too; use 0, or an advantage without value head"


def _refill(recipe: RecipeKeys, phase: ResolvedPhase, at: dict[str, str]) -> Iterator[str]:
    """Check that groups of equal rewards give no gradient, and that they are known before the next step is sampled."""
    key = f"{at['rollout']}.refill"
    if not phase.objective.uses_advantages:
        yield f"{key}: {phase.objective.label} also learns from groups of equal rewards; remove it"
    elif recipe.advantage.smallest_group < 2 or recipe.advantage.reads_scores:
        why = f"advantage {recipe.advantage.label} also learns from groups of equal rewards"
        yield f"{key}: {why}; remove it, or use advantage.kind group"
    if phase.rollout.staleness:
        why = "samples of later steps are made before the rewards of this one are known"
        yield f"{key}: with {at['rollout']}.staleness, {why}; remove one of them"


def _turns(recipe: RecipeKeys) -> Iterator[str]:
    """Check that the turns of an episode can be made and scored one after the other, and that their returns can be compared."""
    phases = [(index, phase) for index, phase in enumerate(recipe.resolved_phases()) if phase.most_turns > 1]
    key, takes, advantage = "rollout.turns" if phases else "eval.turns", recipe.image_model.takes, recipe.advantage
    if takes is not None and takes.images[1] == 0:
        yield f"{key}: {recipe.image_model.kind} edits no source images; remove it"
    if getattr(recipe.policy, "prompt_embeddings", "live") == "cached":
        yield "policy.prompt_embeddings: the images of later turns are not known before the run; use live"
    if recipe.evaluates_in_turns and recipe.eval_data().contents().turns == (0, 0):
        yield f"{key}: the held-out tasks of {recipe.data.label} have no turns; on the playground set data.turns, or remove it"
    if phases and (advantage.value_head is not None or advantage.reads_scores or advantage.smallest_group < 2):
        yield f"advantage.kind: {advantage.label} does not compare the returns of one turn of a task; use group"
    for index, phase in phases:
        at, rollout, objective = recipe.phase_key(index, "rollout"), phase.rollout, phase.objective
        if not objective.uses_advantages or objective.compares_groups:
            yield f"{at}.turns: {objective.label} does not learn from advantages of single samples; use policy_gradient, nft or awm"
        for name in ("engine", "staleness", "refill"):
            if getattr(rollout, name):
                yield f"{at}.{name}: with turns, a step is sampled in that step, by the policy's own model; remove one"
        if isinstance(rollout, DenoisingRollout) and rollout.window.branches:
            yield f"{at}.window: from the second turn on, the samples of a group have different sources; use mode window"
        fewest, most = phase.data.contents().turns or (1, 1)
        if fewest < 1 or most > phase.most_turns:
            has = f"the tasks of {recipe.phase_key(index, 'data')} have {fewest} to {most} turns, not 1 to {phase.most_turns}"
            yield f"{at}.turns: {has}; change `most`, or on the playground set data.turns"
        for path, part in rewards_of(recipe, index):
            if part.compares_groups:
                yield f"{path}.kind: {part.name} compares images of a task, which have different sources from the second turn on"
            if isinstance(phase.data, StoredData) and (part.needs_target or part.reads_text):
                yield f"{path}.kind: {part.name} needs a target or a text, which the turns of {phase.data.label} lack; use another"


def _context(recipe: RecipeKeys, phase: ResolvedPhase, at: dict[str, str]) -> ObjectiveContext:
    """The settings of the recipe that the objective of the phase may check."""
    rollout, lora = phase.rollout, recipe.policy.train.lora
    chain = rollout if isinstance(rollout, DenoisingRollout) else None
    return ObjectiveContext(
        objective=at["objective"],
        rollout=at["rollout"],
        model=recipe.policy.model.kind,
        is_autoregressive=rollout.is_autoregressive,
        token_kinds=recipe.policy.token_kinds,
        stochastic=chain is None or chain.transition.stochastic,
        noise_level=None if chain is None else chain.transition.exploration,
        reduction="token" if chain is None else chain.reduction,
        actions=rollout.actions,
        microbatch=recipe.microbatch,
        optimizer_steps=recipe.epochs * recipe.minibatches,
        lora_dropout=None
        if lora is None
        else (f"policy.train{'' if lora is recipe.policy.train else '.lora'}.dropout", lora.dropout),
        num_steps=None if chain is None else chain.num_steps,
        engine=rollout.engine is not None,
        offload=recipe.devices is not None and bool(recipe.devices.offload),
        sharded=recipe.sharding == "fsdp2",
    )
