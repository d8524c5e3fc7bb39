"""Converts the arguments of a ``Trainer`` to a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.config import consent
from retouch.config.imports import module_of, nearest
from retouch.config.live import LIVE
from retouch.config.section import Section
from retouch.data.base import DataSource, StoredData
from retouch.data.kinds import DATA
from retouch.data.sources.table import TableData
from retouch.models.base import ImageModel
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.models.language import LanguageModel
from retouch.objectives.base import Objective
from retouch.objectives.kinds import OBJECTIVES
from retouch.objectives.policy_gradient import GRPO
from retouch.recipe.keys import RecipeKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.recipe.reward_arguments import modules_in_argument
from retouch.renderers.base import RendererSection
from retouch.renderers.kinds import RENDERERS
from retouch.rewards.function import LiveFunction, require_columns
from retouch.trainer.models import model_section, plain, require_pair, train_document
from retouch.trainer.rewards import RewardLike, as_list, reward_document

_OF_SECTIONS = ("ema", "gradient_checkpointing", "max_missing")
"""Keys of sections that are arguments of a ``Trainer``."""
MADE_OF = {
    **{"policy": "model and peft_config", "data": "train_dataset", "reward": "reward_funcs"},
    **{"name": "run_name", "out": "output_dir"},
}
"""Keys of a recipe that a ``Trainer`` sets from its own arguments, with the names of these arguments."""


@dataclass(frozen=True)
class DescribedRun:
    """A run, as described by the arguments of a ``Trainer``.

    ``objects``: the objects of this process that sections of the recipe refer to, by name. ``modules``: the modules of the classes
    whose objects the script passed. The script has already imported these modules, so the recipe may import them too.
    """

    recipe: Recipe
    objects: Mapping[str, Any]
    modules: tuple[str, ...] = ()


def describe(
    *,
    model: Any,
    reward_funcs: RewardLike | Sequence[RewardLike] | None,
    train_dataset: Any,
    eval_dataset: Any = None,
    objective: Objective | None = None,
    peft_config: Any = None,
    processing_class: Any = None,
    renderer: Any = None,
    reward_weights: Sequence[float] | Mapping[str, float] | str | None = None,
    columns: Mapping[str, str] | None = None,
    size: tuple[int, int] | int | None = None,
    output_dir: str | Path = "runs",
    run_name: str | None = None,
    **keys: Any,
) -> DescribedRun:
    """Convert the arguments of a ``Trainer`` to a recipe. Raises ValueError with a line for each mistake.

    ``keys``: other keys of a recipe, as sections, dictionaries or plain values.
    """
    if clash := sorted(MADE_OF.keys() & keys.keys()):
        raise ValueError("\n".join(f"{key}: give {MADE_OF[key]} instead" for key in clash))
    _refuse_unknown(keys)
    size = require_pair(plain("size", size))
    _require_objective(objective)
    section, objects = model_section(model, size=size, key="model", processor=processing_class)
    rewards, combine, functions = reward_document(reward_funcs, reward_weights)
    evaluated = plain("eval", keys.get("eval", {}))
    held_out = not (isinstance(evaluated, dict) and evaluated.get("split") == "train")
    data, tables = _data(train_dataset, eval_dataset, columns, held_out=held_out)
    _require_use_of_pairs(data, objective)
    _require_reward_columns(functions.values(), data)
    objects = {**objects, **functions, **tables}
    writes = isinstance(section, LanguageModel)
    document: dict[str, Any] = {
        "name": run_name or _run_name(section),
        "out": str(output_dir),
        "tasks_per_step": 8,
        "group_size": 2 if objective is not None and objective.needs_pairs else 8,
        "policy": _policy(section, peft_config, keys.pop("ema", None), plain("", keys.pop("gradient_checkpointing", False))),
        "data": DATA.document(data),
        "reward": {**rewards, "combine": combine, **_max_missing(keys)},
        "objective": OBJECTIVES.document(objective or GRPO(clip=0.2 if writes else 1e-4)),
        "rollout": _rollout(section),
    }
    if "steps" not in keys and "passes" not in keys and "phases" not in keys:
        document["steps"] = 100
    if renderer is not None:
        if not writes:
            raise ValueError("renderer: this model makes images itself; a renderer is for a language model that writes prompts")
        document["renderer"], more = _renderer(renderer, size=size)
        objects |= more
    elif section.uses_image_tokens:
        document["renderer"] = {"kind": "codes"}
    document |= {key: plain(key, value) for key, value in keys.items()}
    image_model = renderer.get("model") if isinstance(renderer, Mapping) else renderer
    given = (model, train_dataset, objective, image_model, *as_list(reward_funcs), *keys.values())
    modules = {module for one in given if isinstance(one, Section) for module in _modules(one)}
    modules |= {module for one in as_list(reward_funcs) if isinstance(one, str) for module in modules_in_argument(one)}
    return DescribedRun(parse(document, allow_imports=modules), objects, tuple(sorted(modules)))


def _refuse_unknown(keys: Iterable[str]) -> None:
    """Raise ValueError for keys that no recipe has, with the nearest known name. A wrong key is found before a model is looked
    for."""
    known = {*inspect.signature(describe).parameters, *RecipeKeys.model_fields, *_OF_SECTIONS} - {"keys"}
    mistakes = []
    for key in keys:
        if key not in known and key not in RecipeKeys.renamed_keys:
            near = nearest(key, known)
            mistakes.append(f"{key}: unknown key" + (f"; did you mean {near}?" if near else ""))
    if mistakes:
        raise ValueError("\n".join(mistakes))


def _rollout(section: ImageModel | LanguageModel) -> dict[str, Any]:
    if isinstance(section, LanguageModel):
        return {"kind": "tokens", "max_new_tokens": 2048 if section.uses_image_tokens else 256}
    return {"num_steps": 10, "transition": {"kind": "sde", "noise_level": 0.7}}


def _modules(section: Section) -> Iterator[str]:
    """Yield the module of the section's own class, and the modules of the classes that the section names."""
    yield type(section).__module__
    yield from (module_of(path) for _, path in consent.classes_named(section.model_dump(mode="json")))


def _require_objective(objective: Any) -> None:
    if objective is not None and not isinstance(objective, Objective):
        raise ValueError(
            f"objective: {objective!r:.60}; give an object: retouch.GRPO(clip=1e-4), retouch.NFT(), or one of a class of your own"
        )


def _require_use_of_pairs(data: DataSource, objective: Objective | None) -> None:
    """Raise ValueError if DPO would sample its own pairs although the table contains pairs."""
    makes_pairs = objective is not None and objective.compares_groups and not objective.needs_pairs
    if makes_pairs and isinstance(data, TableData) and {"chosen", "rejected"} <= set(data.has):
        raise ValueError(
            "objective: train_dataset has images `chosen` and `rejected`, and this objective would sample its own pairs; give "
            "retouch.DPO(pairs='data') to learn from the images, or remove these columns"
        )


def _require_reward_columns(functions: Iterable[LiveFunction], data: DataSource) -> None:
    """Raise ValueError for an argument of a reward function that is no column of the tables."""
    for table, columns in data.other_columns().items() if isinstance(data, TableData) else ():
        for each in functions:
            require_columns(each.function, columns, of=table)


def _policy(section: ImageModel | LanguageModel, peft_config: Any, ema: Any, gradient_checkpointing: bool) -> dict[str, Any]:
    kinds = LANGUAGE_MODELS if isinstance(section, LanguageModel) else IMAGE_MODELS
    policy = {
        "kind": "autoregressive" if isinstance(section, LanguageModel) else "denoising",
        "model": kinds.document(section),
        "train": train_document(peft_config),
        "gradient_checkpointing": gradient_checkpointing,
    }
    return policy if ema is None else {**policy, "ema": plain("ema", ema)}


def _max_missing(keys: dict[str, Any]) -> dict[str, Any]:
    return {"max_missing": plain("max_missing", keys.pop("max_missing"))} if "max_missing" in keys else {}


def _data(given: Any, evaluation: Any, columns: Mapping[str, str] | None, *, held_out: bool) -> tuple[DataSource, dict[str, Any]]:
    """The data source, and the tables that it refers to by name. ``held_out``: whether rows are kept for evaluation."""
    if evaluation is not None and isinstance(given, DataSource | str | Path):
        raise ValueError(
            "eval_dataset: needs a table or a stream as train_dataset; give its rows as a list, or leave out eval_dataset, so that "
            "rows of train_dataset are held out"
        )
    if isinstance(given, DataSource):
        if columns:
            raise ValueError(f"columns: train_dataset is a {type(given).__name__}; give the columns to it, if it has such a key")
        return given, dict(given.objects())
    if isinstance(given, str | Path):
        at = _data_at(Path(given), columns)
        return at.model_copy(update={"held_out": _held_out(len(at.rows(seed=0))) if held_out else 0}), {}
    if given is None:
        raise ValueError("train_dataset: missing; give a datasets.Dataset, a list of dictionaries, a folder or a data source")
    if hasattr(given, "take") and not hasattr(given, "__len__"):
        from retouch.data.sources.stream import IterableData

        streamed = IterableData.of(given, evaluation=evaluation, columns=columns, **({} if held_out else {"held_out": 0}))
        return streamed, streamed.objects()
    count = _held_out(len(given)) if held_out and evaluation is None and hasattr(given, "__len__") else 0
    data = TableData.of(given, evaluation=evaluation, columns=columns, held_out=count)
    return data, data.objects()


def _held_out(rows: int) -> int:
    """A tenth of the rows for evaluation, as a count: a share of a few rows could be rounded to 0."""
    return max(1, rows // 10)


def _data_at(path: Path, columns: Mapping[str, str] | None) -> StoredData:
    """The data source of a path: a prompt list, or a folder with metadata."""
    from retouch.data.sources.folder import FolderData
    from retouch.data.sources.prompts import PromptData

    if path.suffix in (".txt", ".jsonl") and path.is_file():
        if columns:
            raise ValueError(f"columns: the columns of a prompt list have fixed names; give the rows of {path} as a list")
        return PromptData(path=str(path))
    if not path.is_dir():
        raise ValueError(f"train_dataset: no folder and no .txt or .jsonl file {path}; for the Hub give datasets.load_dataset(...)")
    return FolderData(path=str(path), columns=dict(columns or {}))


def _renderer(given: Any, *, size: tuple[int, int] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section of a renderer, and the pipeline that it refers to.

    ``given``: a section, an image model (see ``model_section``), or a dictionary of the section's keys, with the image model as
    ``model``.
    """
    if isinstance(given, RendererSection):
        return RENDERERS.document(given), {}
    keys = dict(given) if isinstance(given, Mapping) else {"model": given}
    model = keys.pop("model", None)
    section, objects = model_section(model, size=size, key="renderer")
    if not isinstance(section, ImageModel):
        raise ValueError("renderer: a language model makes no images; give a diffusers pipeline")
    steps = getattr(inspect.signature(type(model).__call__).parameters.get("num_inference_steps"), "default", None)
    edits = section.takes is not None and section.takes.responses and section.takes.images[0] > 0
    usual = {"kind": "response", "encoder": "frozen"} if edits else {"kind": "prompt"}
    return {**usual, "model": IMAGE_MODELS.document(section), "num_steps": steps or 28, **keys}, objects


def _run_name(section: ImageModel | LanguageModel) -> str:
    source = Path(section.source.removeprefix(LIVE)).name or section.kind
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in source).strip("-._") or "run"
