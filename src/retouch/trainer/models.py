"""The recipe's section of a model that is given as an object, a folder or a Hugging Face id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retouch.config.live import LIVE
from retouch.models.base import MEGAPIXEL, DiffusersModel, ImageModel
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.models.language import LanguageModel

_WRITERS = {"qwen2": "qwen", "qwen3": "qwen", "qwen2_vl": "qwen-vl", "qwen2_5_vl": "qwen-vl", "qwen3_vl": "qwen-vl", "emu3": "emu3"}
"""``model_type`` of a transformers configuration, to the kind of language model."""


def model_section(model: Any, *, size: tuple[int, int] | None, key: str) -> tuple[ImageModel | LanguageModel, dict[str, Any]]:
    """The section of ``model``, and the live objects that it refers to.

    ``model``: a section, a loaded diffusers pipeline, or a folder or Hugging Face id of either library. ``size``: (height, width)
    in px of the images; None is the source image's for editors, else the pipeline's own (1024 x 1024 for a path). ``key``: the
    argument, for messages. Raises ValueError if its family is unknown.
    """
    if isinstance(model, ImageModel | LanguageModel):
        return model, {}
    if isinstance(model, str | Path):
        return _from_path(str(model), size=size, key=key), {}
    if hasattr(model, "components") and hasattr(model, "scheduler"):
        family = _family_of(type(model).__name__, key=key)
        path = LIVE + str(getattr(model, "name_or_path", None) or type(model).__name__)
        dtype: Any = str(model.transformer.dtype).removeprefix("torch.")
        if size is None and family.takes.images[1] == 0:
            side = int(getattr(model, "default_sample_size", 128)) * int(getattr(model, "vae_scale_factor", 8))
            size = (side, side)
        return family(path=path, dtype=dtype, size=size), {path: model}
    raise ValueError(
        f"{key}: {type(model).__name__} cannot be trained; give a diffusers pipeline, a folder, a Hugging Face id, or a "
        "section: retouch.models.SD3(path=...), or an object of your own class derived from "
        "retouch.models.base.ImageModel, whose build() returns the model"
    )


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
    kind = _WRITERS.get(str(config.get("model_type")))
    section = LANGUAGE_MODELS.load(kind)
    if section is None or not issubclass(section, LanguageModel):
        known = ", ".join(_WRITERS)
        raise ValueError(f"{key}: {path} is a {config.get('model_type')!r} model, which has no adapter; there are {known}")
    return section.model_validate({"kind": kind, "path": path})


def _family_of(pipeline: str, *, key: str) -> type[DiffusersModel]:
    """The family of a diffusers pipeline class."""
    families = {
        family.pipeline: family
        for family in IMAGE_MODELS.classes()
        # The playground's models are tiny ones of published families, in a layout of their own.
        if issubclass(family, DiffusersModel) and family.pipeline and not family.__module__.startswith("retouch.playground")
    }
    if pipeline in families:
        return families[pipeline]
    raise ValueError(f"{key}: {pipeline} has no adapter; there are {', '.join(sorted(map(str, families)))}, or write your own")


def _json(path: str, name: str, *, key: str) -> dict[str, Any] | None:
    """A JSON file of a local folder or of a Hugging Face repository; None where it has no such file.

    Raises ValueError if there is neither, or if the Hub cannot be reached.
    """
    if Path(path).is_dir():
        file = Path(path) / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        found: dict[str, Any] = json.loads(Path(hf_hub_download(path, name)).read_text(encoding="utf-8"))
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
