"""The section of a recipe for a model or an adapter that a script gives to a ``Trainer``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from retouch.config import consent, other_names
from retouch.config.errors import places
from retouch.config.imports import module_of, nearest
from retouch.config.section import LIVE, Section
from retouch.data.base import DataSource
from retouch.data.kinds import DATA
from retouch.data.sources.folder import FolderData, PromptData
from retouch.data.sources.hub import TableData
from retouch.data.sources.stream import IterableData
from retouch.models.any_pipeline import DiffusersPipeline
from retouch.models.any_pipeline.model import call_parameters, denoiser_name, trained_scheduler
from retouch.models.base import USUAL_SIZE, Attention, Bits, DiffusersModel, Dtype, ImageModel, LanguageModel
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.models.loaded import LoadedLanguageModel, require_as_built, require_plain
from retouch.models.lora import DESCRIPTIVE, unusual_fields
from retouch.models.parts import euler_scheduler
from retouch.models.quantized import compute_dtype
from retouch.models.train import FullWeights, Lora
from retouch.objectives.advantages import Advantage
from retouch.objectives.base import Objective
from retouch.objectives.kinds import ADVANTAGES, OBJECTIVES
from retouch.objectives.policy_gradient import GRPO, PolicyGradient
from retouch.policies.rollout import DenoisingRollout
from retouch.recipe.document import value_at
from retouch.recipe.keys import RecipeKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_combined
from retouch.records.files import read_json
from retouch.renderers.base import RendererSection
from retouch.renderers.kinds import RENDERERS
from retouch.rewards.base import RewardSection
from retouch.rewards.function import FunctionReward, require_columns
from retouch.rewards.kinds import KINDS as REWARDS


def plain(key: str, value: Any) -> Any:
    """Convert the value of a recipe's key to JSON."""
    if isinstance(value, Advantage):
        return ADVANTAGES.document(value)
    if isinstance(value, Section):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return {name: plain(name, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(key, inner) for inner in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a scalar of NumPy or of torch
        return value.item()
    return str(value) if isinstance(value, Path) else value


def train_document(peft_config: Any) -> dict[str, Any]:
    """The document of ``policy.train`` for None (all weights), a section, or a ``peft.LoraConfig``."""
    if peft_config is None:
        return FullWeights().model_dump(mode="json")
    if isinstance(peft_config, Section):
        return peft_config.model_dump(mode="json")
    if type(peft_config).__name__ == "LoraConfig":
        problems = []
        if isinstance(peft_config.target_modules, str):
            problems.append(
                f"peft_config.target_modules: {peft_config.target_modules!r} is a pattern; give a list of endings of layer names, "
                "such as ['to_q', 'to_v'], or None for the usual layers of the model's family"
            )
        supported = ("r", "lora_alpha", "lora_dropout", "target_modules")
        # policy.train initializes a LoRA as "gaussian" does.
        initial = ("init_lora_weights",) if peft_config.init_lora_weights == "gaussian" else ()
        unusual = unusual_fields(vars(peft_config), vars(type(peft_config)()), known=(*supported, *DESCRIPTIVE, *initial))
        problems += [
            f"peft_config.{name}: {value!r} is not supported; leave it at {default!r}. Retouch uses {', '.join(supported)}"
            for name, (value, default) in unusual.items()
        ]
        if problems:
            raise ValueError("\n".join(problems))
        targets = peft_config.target_modules
        lora = Lora(
            rank=peft_config.r,
            alpha=float(peft_config.lora_alpha),
            targets=None if targets is None else tuple(sorted(targets)),
            dropout=float(peft_config.lora_dropout),
        )
        return lora.model_dump(mode="json")
    raise ValueError(f"peft_config: {type(peft_config).__name__}; give retouch.Lora(rank=32), a peft.LoraConfig, or None")


def base_document(config: Any) -> dict[str, Any] | None:
    """The document of ``policy.base`` for None, "8bit", "4bit", such a document, or an object of diffusers or transformers that
    means the same.

    The layers compute in the dtype of the model, whatever the object says.
    """
    if config is None:
        return None
    if isinstance(config, Mapping):
        return dict(config)
    if config in get_args(Bits):
        return {"quantize": config}
    name, problem = type(config).__name__, None
    if name == "PipelineQuantizationConfig" and config.quant_mapping:
        found = {part: each["quantize"] for part, given in config.quant_mapping.items() if (each := base_document(given))}
        encoders = {bits for part, bits in found.items() if part.startswith("text_encoder")}
        if len(encoders) > 1 or not all(part.startswith(("transformer", "text_encoder")) for part in found):
            raise ValueError("quantization_config: only the transformer and all text encoders, in one way, can be quantised")
        return {"quantize": found.get("transformer"), "text_encoders": next(iter(encoders), None)}
    skipped = getattr(config, "modules_to_not_convert", None) or getattr(config, "llm_int8_skip_modules", None)
    bits = "8bit"
    if name == "BitsAndBytesConfig" and config.load_in_4bit:
        given = (config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant)
        problem = None if given == ("nf4", True) else "only bnb_4bit_quant_type='nf4' with bnb_4bit_use_double_quant=True is used"
        bits = "4bit"
    elif name == "BitsAndBytesConfig":
        problem = "in 8 bits it picks outliers over all rows of a batch, so that a probability depends on the other rows"
    elif name == "TorchAoConfig":
        quantizer = type(config.quant_type).__name__
        problem = None if quantizer == "Int8WeightOnlyConfig" else f"{quantizer} is not used, only Int8WeightOnlyConfig"
    elif name == "GGUFQuantizationConfig":
        raise ValueError(
            "quantization_config: a GGUF file is loaded with from_single_file of the transformer; give the loaded pipeline as model"
        )
    else:
        raise ValueError(f"quantization_config: {config!r:.60}; give '8bit', '4bit', a BitsAndBytesConfig or a TorchAoConfig")
    if skipped:
        problem = "it names modules to leave out, and Retouch quantises the linear layers of all blocks"
    if problem is not None:
        raise ValueError(f"quantization_config: {name}: {problem}; give '{bits}'")
    return {"quantize": bits}


_WRITERS = {
    **{"qwen2": "qwen", "qwen3": "qwen", "qwen2_vl": "qwen-vl", "qwen2_5_vl": "qwen-vl", "qwen3_vl": "qwen-vl"},
    **{"emu3": "emu3", "janus": "janus"},
}
"""``model_type`` of a transformers configuration, to the kind of language model."""


def model_section(
    model: Any, *, size: tuple[int, int] | None, dtype: Dtype | None, gpu: bool, key: str, processor: Any = None
) -> tuple[ImageModel | LanguageModel, dict[str, Any]]:
    """Make the recipe section of ``model``; also returns the live objects that the section refers to.

    ``model``: a section, a loaded diffusers pipeline or transformers language model, or a folder or Hugging Face id of either
    library. ``size``: (height, width) in px of the images; None uses the size of the source image for editors, otherwise 512 x 512,
    or the default size of the pipeline if that is smaller. ``dtype``: None uses that of a loaded model, otherwise bfloat16 if
    ``gpu``, and float32 on a CPU, where bfloat16 is slower. ``key``: the argument, for messages. ``processor``: the tokenizer or
    processor of a loaded language model. Raises ValueError if the model's family is unknown, or if the model cannot be trained as
    it is.
    """
    if processor is not None and not _is_language_model(model):
        raise ValueError("processing_class: it belongs to a loaded language model; omit it")
    if isinstance(model, ImageModel | LanguageModel):
        if size not in (None, getattr(model, "size", None)) and isinstance(model, ImageModel):
            raise ValueError(f"size: {key} is a section, which has its own; write retouch.models.NAME(..., size={list(size)})")
        return model, {}
    if isinstance(model, str | Path):
        return _from_path(str(model), size=size, dtype=dtype or ("bfloat16" if gpu else "float32"), key=key), {}
    if hasattr(model, "components") and hasattr(model, "scheduler"):
        family = _family_of(type(model).__name__)
        path = _live_name(model)
        if family is DiffusersPipeline:
            name = denoiser_name(model)
            call_parameters(type(model))
            trained_scheduler(model.scheduler, of=type(model).__name__)
            for part, module in model.components.items():
                if hasattr(module, "named_modules"):
                    require_plain(module, key=f"{key}.{part}")
            dtype = _dtype(model.components[name], dtype, key=f"{key}.{name}")
            return DiffusersPipeline(path=path, dtype=dtype, size=size), {path: model}
        euler_scheduler(model.scheduler, key=f"{key}.scheduler")
        require_as_built(model, key=key)
        if size is None and family.takes.images[1] == 0:
            size = _usual_size(getattr(model, "default_sample_size", 128), getattr(model, "vae_scale_factor", 8))
        return family(path=path, dtype=_dtype(model.transformer, dtype, key=f"{key}.transformer"), size=size), {path: model}
    if _is_language_model(model):
        return _loaded_language_model(model, processor, size=size, dtype=dtype, key=key)
    raise ValueError(
        f"{key}: {type(model).__name__} cannot be trained; give a diffusers pipeline, a transformers model, a folder, a Hugging "
        "Face id, or a section: retouch.models.SD3(path=...), or an object of your own class derived from "
        "retouch.models.base.ImageModel, whose build() returns the model"
    )


def _usual_size(sample: int, scale: int) -> tuple[int, int]:
    """512 x 512 px, or the size of ``sample`` latents, each ``scale`` px wide, if that is smaller."""
    return (min(int(sample) * int(scale), USUAL_SIZE[0]),) * 2


def _is_language_model(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "model_type") and hasattr(model, "get_output_embeddings")


def _loaded_language_model(
    model: Any, processor: Any, *, size: tuple[int, int] | None, dtype: Dtype | None, key: str
) -> tuple[LanguageModel, dict[str, Any]]:
    require_plain(model, key=key)
    section = _language_family(model.config.model_type, name=type(model).__name__, key=key)
    if processor is None and not model.name_or_path:
        raise ValueError("processing_class: missing; give the tokenizer of the model, or its processor if it reads images")
    kind = _WRITERS[model.config.model_type]
    if kind == "qwen-vl" and processor is not None and not hasattr(processor, "image_processor"):
        raise ValueError(
            f"processing_class: a {type(processor).__name__} reads no images; give AutoProcessor.from_pretrained(...) of the model"
        )
    attention = getattr(model.config, "_attn_implementation", None)
    path = _live_name(model)
    fields = {"kind": kind, "path": path, "dtype": _dtype(model, dtype, key=key)}
    fields |= {"attention": attention} if attention in get_args(Attention) else {}
    fields |= {} if size is None or "size" not in section.model_fields else {"size": size}
    return section.model_validate(fields), {path: LoadedLanguageModel(model, processor)}


def _live_name(model: Any) -> str:
    return LIVE + str(getattr(model, "name_or_path", None) or type(model).__name__)


def _dtype(module: Any, given: Dtype | None, *, key: str) -> Any:
    dtype = str(compute_dtype(module)).removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise ValueError(f"{key}: weights of the dtype {dtype} cannot be trained; load the model in {', '.join(get_args(Dtype))}")
    if given not in (None, dtype):
        raise ValueError(f"dtype: {given}, and {key} was loaded in {dtype}; load it with torch_dtype=torch.{given}, or omit dtype")
    return dtype


def _from_path(path: str, *, size: tuple[int, int] | None, dtype: Dtype, key: str) -> ImageModel | LanguageModel:
    for kinds in (IMAGE_MODELS, LANGUAGE_MODELS):
        if path in kinds and not Path(path).exists() and (section := kinds.load(path)) is not None:
            needed = ", ".join(f"{name}=..." for name, field in section.model_fields.items() if field.is_required())
            name = section.__name__.removesuffix("Model")
            raise ValueError(f"{key}: {path!r} is the kind of a model in a recipe; write {key}=retouch.models.{name}({needed})")
    # A playground's model derives from the section of a published one, and has its hub_ids.
    families = [each for each in IMAGE_MODELS.classes() if issubclass(each, DiffusersModel) and not each.packaged]
    known = None if Path(path).is_dir() else next((family for family in families if path in family.hub_ids), None)
    pipeline = None if known else _json(path, "model_index.json", key=key)
    if known or pipeline is not None:
        family = known or _family_of(str((pipeline or {}).get("_class_name")))
        if size is None and family.takes.images[1] == 0 and Path(path).is_dir():
            transformer, vae = ((_json(path, f"{part}/config.json", key=key) or {}) for part in ("transformer", "vae"))
            size = _usual_size(transformer.get("sample_size", 128), 2 ** (len(vae.get("block_out_channels", range(4))) - 1))
        return family(path=path, size=size, dtype=dtype)
    config = _json(path, "config.json", key=key)
    if config is None:
        raise ValueError(
            f"{key}: {path} has neither model_index.json (diffusers) nor config.json (transformers); give a folder with one of "
            "them, or a Hugging Face id that can be reached"
        )
    section = _language_family(str(config.get("model_type")), name=path, key=key)
    fields = {"kind": _WRITERS[config["model_type"]], "path": path, "dtype": dtype}
    return section.model_validate(fields if size is None or "size" not in section.model_fields else {**fields, "size": size})


def _language_family(model_type: str, *, name: str, key: str) -> type[LanguageModel]:
    """The family of a transformers configuration. ``name``: the model, for the message."""
    section = LANGUAGE_MODELS.load(_WRITERS.get(model_type))
    if section is None or not issubclass(section, LanguageModel):
        raise ValueError(f"{key}: {name} is a {model_type!r} model, which is not supported; supported are {', '.join(_WRITERS)}")
    return section


def _family_of(pipeline: str) -> type[DiffusersModel]:
    """The family of a diffusers pipeline class; without one, the section of any pipeline."""
    families = {
        family.pipeline: family
        for family in IMAGE_MODELS.classes()
        # The playground's models are tiny versions of published families, with a layout of their own.
        if issubclass(family, DiffusersModel) and family is not DiffusersPipeline and not family.packaged
    }
    return families.get(pipeline, DiffusersPipeline)


def _json(path: str, name: str, *, key: str) -> dict[str, Any] | None:
    """Read a JSON file of a local folder or of a Hugging Face repository; None if that has no such file.

    Raises ValueError if there is neither a folder nor a repository, or if the Hub cannot be reached.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return read_json(file) if file.is_file() else None
    try:
        found: dict[str, Any] = read_json(Path(hf_hub_download(path, name)))
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{key}: there is no folder {path}, and no such repository on the Hugging Face Hub") from None
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{key}: there is no folder {path}, and the Hugging Face Hub cannot be reached; download the model elsewhere and give "
            "its folder"
        ) from None
    except EntryNotFoundError:
        return None
    return found


def require_pair(size: Any) -> tuple[int, int] | None:
    """Convert a size to (height, width): a pair, one number for a square, or None. Raises ValueError for other values."""
    if size is None or isinstance(size, int):
        return None if size is None else (size, size)
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size)):
        raise ValueError(f"size: {size!r}; give (height, width) in pixels, or one number for a square")
    return size[0], size[1]


RewardLike: TypeAlias = Any
"""A reward object, a function, or a reward's kind (``"pickscore"``), with its path after a colon (``"clip:FOLDER"``)."""


def reward_document(
    given: RewardLike | Sequence[RewardLike] | None, weights: Sequence[float] | Mapping[str, float] | str | None
) -> tuple[dict[str, Any], Mapping[str, float] | str, dict[str, Any]]:
    """The document of the rewards, their combination, and the reward functions by name."""
    if given is None:
        if weights is not None:
            raise ValueError("reward_weights: there are no reward_funcs to weight; give both, or neither")
        return {"kind": "none"}, {}, {}
    listed = as_list(given)
    if not listed:
        raise ValueError("reward_funcs: empty; give at least one reward")
    sections: dict[str, RewardSection] = {}
    for one in listed:
        named = parse_reward(read_combined(one), allow_imports=modules_in_argument(one)) if isinstance(one, str) else one
        section = named if isinstance(named, RewardSection) else FunctionReward.of(named)
        if section.name in sections:
            raise ValueError(f"reward_funcs: two rewards are called {section.name!r}; rename one of the functions")
        sections[section.name] = section
    functions = {section.live_name: section.load("cpu") for section in sections.values() if isinstance(section, FunctionReward)}
    combine = _combine(list(sections.values()), weights)
    if len(sections) == 1:
        (only,) = sections.values()
        document = REWARDS.document(only)
        return {**document, "combine": combine}, combine or only.combine, functions
    documents = {name: REWARDS.document(section) for name, section in sections.items()}
    shared = ("combine", "max_missing")
    parts = {name: {key: value for key, value in each.items() if key not in shared} for name, each in documents.items()}
    return {"kind": "several", "rewards": parts}, combine, functions


def as_list(given: RewardLike | Sequence[RewardLike]) -> list[RewardLike]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _combine(
    sections: Sequence[RewardSection], weights: Sequence[float] | Mapping[str, float] | str | None
) -> Mapping[str, float] | str:
    """The combination of the columns: a formula, weights by column, or one weight per reward, by default 1 each."""
    if isinstance(weights, str | Mapping):
        return weights if isinstance(weights, str) else {name: plain(name, weight) for name, weight in weights.items()}
    if weights is not None and len(weights) != len(sections):
        raise ValueError(f"reward_weights: {len(weights)} weights for {len(sections)} rewards; give one for each")
    each = [1.0] * len(sections) if weights is None else [float(weight) for weight in weights]
    if len(sections) == 1 and weights is None and sections[0].combine:
        return sections[0].combine
    combined = {}
    for section, weight in zip(sections, each, strict=True):
        columns = section.known_columns() or {}
        scores = [name for name, column in columns.items() if not column.diagnostic]
        if section.combine and isinstance(section.combine, dict):
            scores = list(section.combine)
        if len(scores) != 1:
            raise ValueError(
                f"reward_weights: {section.name} has the columns {', '.join(columns) or '(not known yet)'}; say which train, for "
                f"example reward_weights={{{(scores or ['column'])[0]!r}: 1.0}}"
            )
        combined[scores[0] if len(sections) == 1 else f"{section.name}/{scores[0]}"] = weight
    return combined


_OF_SECTIONS = ("ema", "gradient_checkpointing", "max_missing")
"""Keys of sections that are arguments of a ``Trainer``."""
MADE_OF = {
    **{"policy": "model and peft_config", "reward": "reward_funcs"},
    **{"name": "run_name", "out": "output_dir"},
}
"""Keys of a recipe that a ``Trainer`` sets from its own arguments, with the names of these arguments."""


_SIZES = ("microbatch", "rollout.chunk", "eval.batch", "renderer.batch")
FITTED = (
    *_SIZES,
    *("optimizer.moments", "devices.offload", "devices.swap_blocks"),
    *(f"policy.{key}" for key in ("gradient_checkpointing", "prompt_embeddings", "base")),
    *("policy.model.vae_slicing", "policy.model.vae_tiling"),
)
"""Keys that are chosen for a GPU's memory if the script does not set them."""


def is_told(told: Mapping[str, Any], key: str) -> bool:
    """Whether the arguments of a ``Trainer`` set a key of the recipe."""
    node: Any = told
    for part in key.removeprefix("policy.").split("."):
        if isinstance(node, Section):
            node = node.model_dump(exclude_unset=True)
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def chosen_lines(recipe: Recipe) -> list[str]:
    """What depends on the model and the device, in at most four lines."""
    policy, rollout, model = recipe.policy, recipe.rollout, recipe.image_model
    size = "the size of the source image" if recipe.image_size is None else "{} x {} px".format(*recipe.image_size)
    guidance = getattr(rollout if recipe.renderer is None else recipe.renderer, "guidance_scale", 1.0)
    lines = [f"{model.source}: {size}, guidance {guidance:g}, {getattr(policy.model, 'dtype', 'float32')}"]
    if isinstance(rollout, DenoisingRollout):
        window = rollout.window.model_dump(mode="json", exclude_unset=True)
        lines.append(f"{rollout.num_steps} denoising steps, of which train: {json.dumps(window)}")
    document = recipe.document()
    saving = [f"{key}={value}" for key in FITTED if "." in key and key not in _SIZES and (value := value_at(document, key))]
    lines.append(f"memory is saved by: {', '.join(saving) or 'nothing'}")
    lines.append(", ".join(f"{key} {value}" for key in _SIZES if (value := value_at(document, key)) is not None))
    return lines


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
    quantization_config: Any = None,
    processing_class: Any = None,
    call: Mapping[str, Any] | None = None,
    renderer: Any = None,
    reward_weights: Sequence[float] | Mapping[str, float] | str | None = None,
    columns: Mapping[str, str] | None = None,
    size: tuple[int, int] | int | None = None,
    dtype: Any = None,
    output_dir: str | Path = "runs",
    run_name: str | None = None,
    gpu: bool = False,
    **keys: Any,
) -> DescribedRun:
    """Convert the arguments of a ``Trainer`` to a recipe. Raises ValueError with a line for each mistake.

    ``gpu``: use the defaults of a GPU. ``keys``: other keys of a recipe, as sections, dictionaries or plain values.
    """
    more_data = plain("data", keys.pop("data", {}))
    if not isinstance(more_data, Mapping) or {"kind", "path"} & more_data.keys():
        raise ValueError("data: give the data as train_dataset, and further keys as a dictionary: data={'on_bad_row': 'skip'}")
    if clash := sorted(MADE_OF.keys() & keys.keys()):
        raise ValueError("\n".join(f"{key}: give {MADE_OF[key]} instead" for key in clash))
    # A wrong key is found before a model is looked for.
    known = {*inspect.signature(describe).parameters, *RecipeKeys.model_fields, *_OF_SECTIONS} - {"keys", "gpu"}
    if unknown := [key for key in keys if key not in known]:
        named = isinstance(model, str | Path) and any(each.partition("_")[0] in str(model).lower() for each in _WRITERS)
        writes = renderer is not None or named or isinstance(model, LanguageModel) or _is_language_model(model)
        raise ValueError("\n".join(_unknown(unknown, {**keys, "model": model}, known, writes=writes)))
    size = require_pair(plain("size", size))
    if objective is not None and not isinstance(objective, Objective):
        raise ValueError(
            f"objective: {objective!r:.60}; give an object: retouch.GRPO(clip=1e-4), retouch.NFT(), or one of a class of your own"
        )
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    if dtype not in (None, *get_args(Dtype)):
        raise ValueError(f"dtype: {dtype!r}; give one of {', '.join(get_args(Dtype))}")
    section, objects = model_section(model, size=size, dtype=dtype, gpu=gpu, key="model", processor=processing_class)
    if call is not None:
        if not isinstance(section, DiffusersPipeline):
            raise ValueError(f"call: {section.kind} has no arguments of a pipeline; set rollout=dict(guidance_scale=...)")
        section = section.model_copy(update={"call": dict(call)})
    rewards, combine, functions = reward_document(reward_funcs, reward_weights)
    evaluated = plain("eval", keys.get("eval", {}))
    held_out = not (isinstance(evaluated, dict) and evaluated.get("split") == "train")
    data, tables = _data(train_dataset, eval_dataset, columns, held_out=held_out)
    table = data if isinstance(data, TableData) else None
    makes_pairs = objective is not None and objective.compares_groups and not objective.needs_pairs
    if makes_pairs and table is not None and {"chosen", "rejected"} <= set(table.has):
        raise ValueError(
            "objective: train_dataset has images `chosen` and `rejected`, and this objective would sample its own pairs; give "
            "retouch.DPO(pairs='data') to learn from the images, or remove these columns"
        )
    for name, found in () if table is None else table.other_columns().items():
        for each in functions.values():
            require_columns(each.function, found, of=name)
    objects = {**objects, **functions, **tables}
    writes, ema = isinstance(section, LanguageModel), keys.pop("ema", None)
    objective = objective or GRPO()
    if isinstance(objective, PolicyGradient):
        objective = objective.for_policy(is_autoregressive=writes)
    # A stream's prompts are not known before the run.
    whole = isinstance(section, DiffusersModel) and not isinstance(section, DiffusersPipeline)
    caches = gpu and whole and not isinstance(data, IterableData)
    rollout: dict[str, Any] = {"kind": "tokens", "max_new_tokens": 2048 if section.uses_image_tokens else 256}
    if not writes:
        # As many steps as the model is usually trained with; if log-probabilities train, a window of two stochastic steps in the
        # first half of the chain (Flow-GRPO-Fast).
        steps = section.usual_settings(section.path).steps if isinstance(section, DiffusersModel) else 10
        rollout = {"num_steps": steps, "transition": {"kind": "sde", "noise_level": 0.7}}
        if objective.needs_log_probs and steps >= 8:
            rollout["window"] = {"mode": "window", "size": 2, "high": steps // 2}
    source = Path(section.source.removeprefix(LIVE)).name or section.kind
    letters = [letter if letter.isalnum() or letter in "._-" else "-" for letter in source]
    document: dict[str, Any] = {
        "name": run_name or ("".join(letters).strip("-._") or "run"),
        "out": str(output_dir),
        "tasks_per_step": 8,
        "group_size": 2 if objective is not None and objective.needs_pairs else 8,
        "policy": {
            "kind": "autoregressive" if writes else "denoising",
            "model": (LANGUAGE_MODELS if writes else IMAGE_MODELS).document(section),
            "train": train_document(peft_config),
            **({} if quantization_config is None else {"base": base_document(quantization_config)}),
            "gradient_checkpointing": plain("", keys.pop("gradient_checkpointing", gpu and not writes)),
            **({"prompt_embeddings": "cached"} if caches else {}),
            **({} if ema is None else {"ema": plain("ema", ema)}),
        },
        "data": {**DATA.document(data), **more_data},
        "reward": {
            **rewards,
            "combine": combine,
            **({"max_missing": plain("max_missing", keys.pop("max_missing"))} if "max_missing" in keys else {}),
        },
        "objective": OBJECTIVES.document(objective),
        "rollout": rollout,
    }
    if "steps" not in keys and "passes" not in keys and "phases" not in keys:
        document["steps"] = 100
    if renderer is not None:
        if not writes:
            raise ValueError("renderer: this model makes images itself; a renderer is for a language model that writes prompts")
        document["renderer"], more = _renderer(renderer, size=size, dtype=dtype, gpu=gpu)
        objects |= more
    elif section.uses_image_tokens:
        document["renderer"] = {"kind": "codes"}
    document |= {key: plain(key, value) for key, value in keys.items()}
    image_model = renderer.get("model") if isinstance(renderer, Mapping) else renderer
    given = (model, train_dataset, objective, image_model, *as_list(reward_funcs), *keys.values())
    sections = [one for one in given if isinstance(one, Section)]
    modules = {type(one).__module__ for one in sections}
    modules |= {module_of(path) for one in sections for _, path in consent.classes_named(one.model_dump(mode="json"))}
    modules |= {module for one in as_list(reward_funcs) if isinstance(one, str) for module in modules_in_argument(one)}
    return DescribedRun(parse(document, allow_imports=modules), objects, tuple(sorted(modules)))


def _unknown(unknown: Sequence[str], keys: Mapping[str, Any], known: Collection[str], *, writes: bool) -> list[str]:
    """The lines about unknown arguments, with what they probably mean: a similar name, or what can be pasted in their place. Those
    that one argument replaces share a line. ``writes``: the model writes tokens."""
    lines, instead = [], dict[str, tuple[list[str], dict[str, Any]]]()
    for key in unknown:
        inside = [place for place in places(Recipe).get(key, ()) if place.partition(".")[0] in known and place.count(".") == 1]
        if key in other_names.TRL:
            found = other_names.place(key, keys, writes=writes)
        elif near := nearest(key, known):
            found = f"did you mean {near}?"
        else:
            found = (inside[0], keys[key], True) if inside else ""
        if isinstance(found, str):
            lines.append(f"{key}: unknown key{'; ' * bool(found)}{found}")
            continue
        argument, _, field = found[0].partition(".")
        given = keys.get(argument)
        names, fields = instead.setdefault(argument, ([], dict(given) if isinstance(given, Mapping) else {}))
        names.append(key)
        if found[2] or field not in fields:
            fields[field] = found[1]
    for argument, (names, fields) in instead.items():
        others = " and ".join(other_names.called(name) for name in names if name in other_names.TRL)
        for_others = f"for {others} write" if others else "write"
        lines.append(f"{', '.join(names)}: unknown key; {for_others} {other_names.written(argument, fields)}")
    return lines


def _data(given: Any, evaluation: Any, columns: Mapping[str, str] | None, *, held_out: bool) -> tuple[DataSource, dict[str, Any]]:
    """The data source, and the tables that it refers to by name. ``held_out``: whether a tenth of the rows is kept for evaluation,
    as a count, because a share of a few rows could be rounded to 0."""
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
        path, keys = Path(given), {"path": str(given), "columns": dict(columns or {})}
        is_list = path.suffix in (".txt", ".jsonl") and path.is_file()
        if not is_list and not path.is_dir():
            raise ValueError(
                f"train_dataset: no folder and no .txt or .jsonl file {path}; for the Hub give datasets.load_dataset(...)"
            )
        at = PromptData(**keys) if is_list else FolderData(**keys)
        return at.model_copy(update={"held_out": max(1, len(at.rows(seed=0)) // 10) if held_out else 0}), {}
    if given is None:
        raise ValueError("train_dataset: missing; give a datasets.Dataset, a list of dictionaries, a folder or a data source")
    if hasattr(given, "take") and not hasattr(given, "__len__"):
        streamed = IterableData.of(given, evaluation=evaluation, columns=columns, **({} if held_out else {"held_out": 0}))
        return streamed, streamed.objects()
    count = max(1, len(given) // 10) if held_out and evaluation is None and hasattr(given, "__len__") else 0
    data = TableData.of(given, evaluation=evaluation, columns=columns, held_out=count)
    return data, data.objects()


def _renderer(given: Any, *, size: tuple[int, int] | None, dtype: Dtype | None, gpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section of a renderer, and the pipeline that it refers to.

    ``given``: a section, an image model (see ``model_section``), or a dictionary of the section's keys, with the image model as
    ``model``.
    """
    if isinstance(given, RendererSection):
        return RENDERERS.document(given), {}
    keys = dict(given) if isinstance(given, Mapping) else {"model": given}
    model = keys.pop("model", None)
    section, objects = model_section(model, size=size, dtype=dtype, gpu=gpu, key="renderer")
    if not isinstance(section, ImageModel):
        raise ValueError("renderer: a language model makes no images; give a diffusers pipeline")
    steps = getattr(inspect.signature(type(model).__call__).parameters.get("num_inference_steps"), "default", None)
    edits = section.takes is not None and section.takes.responses and section.takes.images[0] > 0
    usual = {"kind": "response", "encoder": "frozen"} if edits else {"kind": "prompt"}
    return {**usual, "model": IMAGE_MODELS.document(section), "num_steps": steps or 28, **keys}, objects
