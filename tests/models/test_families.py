"""The image models that a recipe can select: parsed without torch, built in or imported from the user's code."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from retouch.config.errors import kinds_of
from retouch.models.base import DiffusersModel, ImageModel, ImportedModel
from retouch.models.kinds import IMAGE_MODELS
from retouch.protocols import DenoisingModel
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import load

HEAVY = ("torch", "diffusers", "transformers", "peft", "numpy", "huggingface_hub")
READ_ALL = """
import json, sys
from pydantic import TypeAdapter
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.base import ImageModel
from typing import Annotated
section = TypeAdapter(Annotated[ImageModel, IMAGE_MODELS])
for kind in IMAGE_MODELS:
    own = {"class": "nowhere:Mine"} if kind == "import" else {"path": "some/where", "size": [32, 48]}
    section.validate_json(json.dumps({"kind": kind, **own}))
print([name for name in json.loads(sys.argv[1]) if name in sys.modules])
"""


class Mine(ImageModel):
    """A user's model with fields."""

    width: int = 8


class Halved(DiffusersModel):
    """A user's model family."""

    adapter = "nowhere:Adapter"
    pipeline = "FluxPipeline"
    strength: float


class Plain(DenoisingModel):
    """An adapter that is no section."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.module = torch.nn.Identity()


def policy(**model: Any) -> DenoisingPolicyKeys:
    return DenoisingPolicyKeys.model_validate_json(json.dumps({"kind": "denoising", "model": model, "train": {"kind": "full"}}))


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("recipes/qwen-image-2/flow-grpo.jsonnet", "policy.model.source_area"),
        ("recipes/sd3/prompt-enhancer.jsonnet", "policy.model.area"),
    ],
)
def test_an_area_smaller_than_the_smallest_size_is_refused(recipe: str, key: str) -> None:
    load(recipe, [f"{key}={32 * 32}"])
    with pytest.raises(ValueError, match=rf"{key}: should be greater than or equal to 1024, not 1023"):
        load(recipe, [f"{key}={32 * 32 - 1}"])


def test_no_kind_imports_torch_when_a_recipe_is_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, json.dumps(HEAVY)], capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout.replace("'", '"')) == []


@pytest.mark.parametrize("kind", [kind for kind in IMAGE_MODELS if kind != "import"])
def test_each_kind_is_parsed_to_its_class_and_serialised_back(kind: str) -> None:
    section = IMAGE_MODELS.load(kind)
    assert section is not None
    assert issubclass(section, DiffusersModel)
    assert kinds_of(section) == ("kind", (kind,))
    document = {"kind": kind, "path": "some/where", "size": [32, 48], "dtype": "float16"}
    made = policy(**document)
    assert type(made.model) is section
    assert list(made.model_dump(mode="json")["model"].items()) == list(document.items())
    assert made.model == section(path="some/where", size=(32, 48), dtype="float16")


def test_imported_model_section_is_parsed_with_its_own_fields() -> None:
    document = {
        "kind": "import",
        "class": f"{__name__}:Halved",
        "args": {"path": "a/b", "size": None, "dtype": "float32", "strength": 0.5},
    }
    made = policy(**document)
    assert made.model == Halved(path="a/b", dtype="float32", strength=0.5)
    assert made.model_dump(mode="json")["model"] == document
    assert policy(kind="import", **{"class": f"{__name__}:Mine"}).model == Mine()
    with pytest.raises(ValueError, match="strength"):
        policy(kind="import", **{"class": f"{__name__}:Halved", "args": {"path": "a/b"}})
    assert made.model.published() is None


def test_imported_class_that_is_no_section_is_imported_at_build() -> None:
    made = policy(kind="import", **{"class": f"{__name__}:Plain", "args": {"width": 3}})
    assert isinstance(made.model, ImportedModel)
    built: Any = made.model.build(device=torch.device("cpu"))
    assert built.width == 3
    assert isinstance(policy(kind="import", **{"class": "nowhere:Mine"}).model, ImportedModel)
