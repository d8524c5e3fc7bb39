"""The models that a recipe can name: one row per kind; `retouch_models` adds those with an adapter of their own."""

from retouch.config.section import Kinds

IMAGE_MODELS = Kinds(
    "image_model",
    {
        "pipeline": "retouch.models.any_pipeline:DiffusersPipeline",
        "import": "retouch.models.base:ImportedModel",
    },
    with_wings=True,
)

LANGUAGE_MODELS = Kinds("language_model", {"import": "retouch.models.base:ImportedLanguageModel"}, with_wings=True)
