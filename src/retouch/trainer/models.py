"""The section of a recipe for a model or an adapter that a script gives to a ``Trainer``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from retouch.config.live import LIVE
from retouch.config.section import Section
from retouch.models.base import MEGAPIXEL, DiffusersModel, Dtype, ImageModel
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.models.language import Attention, LanguageModel
from retouch.models.train import FullWeights, Lora
from retouch.objectives.advantages import Advantage
from retouch.objectives.kinds import ADVANTAGES
from retouch.records.files import read_json


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
        _require_usual(peft_config)
        targets = peft_config.target_modules
        lora = Lora(
            rank=peft_config.r,
            alpha=float(peft_config.lora_alpha),
            targets=None if targets is None else tuple(sorted(targets)),
            dropout=float(peft_config.lora_dropout),
        )
        return lora.model_dump(mode="json")
    raise ValueError(f"peft_config: {type(peft_config).__name__}; give retouch.Lora(rank=32), a peft.LoraConfig, or None")


def _require_usual(config: Any) -> None:
    """Raise ValueError for each setting of a ``peft.LoraConfig`` that would be lost in a recipe."""
    from retouch.models.common.lora import DESCRIPTIVE, unusual_fields

    problems = []
    if isinstance(config.target_modules, str):
        problems.append(
            f"peft_config.target_modules: {config.target_modules!r} is a pattern; give a list of endings of layer names, such as "
            "['to_q', 'to_v'], or None for the usual layers of the model's family"
        )
    supported = ("r", "lora_alpha", "lora_dropout", "target_modules")
    initial = ("init_lora_weights",) if config.init_lora_weights == "gaussian" else ()  # how policy.train initializes a LoRA
    unusual = unusual_fields(vars(config), vars(type(config)()), known=(*supported, *DESCRIPTIVE, *initial))
    problems += [
        f"peft_config.{name}: {value!r} is not supported; leave it at {default!r}. Retouch uses {', '.join(supported)}"
        for name, (value, default) in unusual.items()
    ]
    if problems:
        raise ValueError("\n".join(problems))


_WRITERS = {
    **{"qwen2": "qwen", "qwen3": "qwen", "qwen2_vl": "qwen-vl", "qwen2_5_vl": "qwen-vl", "qwen3_vl": "qwen-vl"},
    **{"emu3": "emu3", "janus": "janus"},
}
"""``model_type`` of a transformers configuration, to the kind of language model."""


def model_section(
    model: Any, *, size: tuple[int, int] | None, key: str, processor: Any = None
) -> tuple[ImageModel | LanguageModel, dict[str, Any]]:
    """Make the recipe section of ``model``; also returns the live objects that the section refers to.

    ``model``: a section, a loaded diffusers pipeline or transformers language model, or a folder or Hugging Face id of either
    library. ``size``: (height, width) in px of the images; None uses the size of the source image for editors, otherwise the
    default size of the pipeline (1024 x 1024 for a path). ``key``: the argument, for messages. ``processor``: the tokenizer or
    processor of a loaded language model. Raises ValueError if the model's family is unknown, or if the model cannot be trained as
    it is.
    """
    if processor is not None and not _is_language_model(model):
        raise ValueError("processing_class: it belongs to a loaded language model; omit it")
    if isinstance(model, ImageModel | LanguageModel):
        return model, {}
    if isinstance(model, str | Path):
        return _from_path(str(model), size=size, key=key), {}
    if hasattr(model, "components") and hasattr(model, "scheduler"):
        return _loaded_pipeline(model, size=size, key=key)
    if _is_language_model(model):
        return _loaded_language_model(model, processor, size=size, key=key)
    raise ValueError(
        f"{key}: {type(model).__name__} cannot be trained; give a diffusers pipeline, a transformers model, a folder, a Hugging "
        "Face id, or a section: retouch.models.SD3(path=...), or an object of your own class derived from "
        "retouch.models.base.ImageModel, whose build() returns the model"
    )


def _is_language_model(model: Any) -> bool:
    return hasattr(getattr(model, "config", None), "model_type") and hasattr(model, "get_output_embeddings")


def _loaded_pipeline(pipeline: Any, *, size: tuple[int, int] | None, key: str) -> tuple[ImageModel, dict[str, Any]]:
    from retouch.models.common.loaded import require_as_built
    from retouch.models.common.parts import euler_scheduler

    family = _family_of(type(pipeline).__name__, key=key)
    euler_scheduler(pipeline.scheduler, key=f"{key}.scheduler")
    require_as_built(pipeline, key=key)
    if size is None and family.takes.images[1] == 0:
        side = int(getattr(pipeline, "default_sample_size", 128)) * int(getattr(pipeline, "vae_scale_factor", 8))
        size = (side, side)
    path = _live_name(pipeline)
    return family(path=path, dtype=_dtype(pipeline.transformer, key=f"{key}.transformer"), size=size), {path: pipeline}


def _loaded_language_model(
    model: Any, processor: Any, *, size: tuple[int, int] | None, key: str
) -> tuple[LanguageModel, dict[str, Any]]:
    from retouch.models.common.loaded import LoadedLanguageModel, require_plain

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
    fields = {"kind": kind, "path": path, "dtype": _dtype(model, key=key)}
    fields |= {"attention": attention} if attention in get_args(Attention) else {}
    fields |= {} if size is None or "size" not in section.model_fields else {"size": size}
    return section.model_validate(fields), {path: LoadedLanguageModel(model, processor)}


def _live_name(model: Any) -> str:
    return LIVE + str(getattr(model, "name_or_path", None) or type(model).__name__)


def _dtype(module: Any, *, key: str) -> Any:
    dtype = str(module.dtype).removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise ValueError(f"{key}: weights of the dtype {dtype} cannot be trained; load the model in {', '.join(get_args(Dtype))}")
    return dtype


def _from_path(path: str, *, size: tuple[int, int] | None, key: str) -> ImageModel | LanguageModel:
    pipeline = _json(path, "model_index.json", key=key)
    if pipeline is not None:
        family = _family_of(str(pipeline.get("_class_name")), key=key)
        return family(path=path, size=MEGAPIXEL if size is None and family.takes.images[1] == 0 else size)
    config = _json(path, "config.json", key=key)
    if config is None:
        raise ValueError(
            f"{key}: {path} has neither model_index.json (diffusers) nor config.json (transformers); give a folder with one of "
            "them, or a Hugging Face id that can be reached"
        )
    section = _language_family(str(config.get("model_type")), name=path, key=key)
    fields = {"kind": _WRITERS[config["model_type"]], "path": path}
    return section.model_validate(fields if size is None or "size" not in section.model_fields else {**fields, "size": size})


def _language_family(model_type: str, *, name: str, key: str) -> type[LanguageModel]:
    """The family of a transformers configuration. ``name``: the model, for the message."""
    section = LANGUAGE_MODELS.load(_WRITERS.get(model_type))
    if section is None or not issubclass(section, LanguageModel):
        raise ValueError(f"{key}: {name} is a {model_type!r} model, which is not supported; supported are {', '.join(_WRITERS)}")
    return section


def _family_of(pipeline: str, *, key: str) -> type[DiffusersModel]:
    """The family of a diffusers pipeline class."""
    families = {
        family.pipeline: family
        for family in IMAGE_MODELS.classes()
        # The playground's models are tiny versions of published families, with a layout of their own.
        if issubclass(family, DiffusersModel) and family.pipeline and not family.packaged
    }
    if pipeline in families:
        return families[pipeline]
    raise ValueError(
        f"{key}: {pipeline} is not supported; supported are {', '.join(sorted(map(str, families)))}, or write your own"
    )


def _json(path: str, name: str, *, key: str) -> dict[str, Any] | None:
    """Read a JSON file of a local folder or of a Hugging Face repository; None if that has no such file.

    Raises ValueError if there is neither a folder nor a repository, or if the Hub cannot be reached.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return read_json(file) if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

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
