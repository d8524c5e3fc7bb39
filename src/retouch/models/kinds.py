"""The models that a recipe can name: one row per kind."""

from retouch.config.section import Kinds

IMAGE_MODELS = Kinds(
    "image_model",
    {
        "qwen-image": "retouch.models.qwen_image:QwenImageModel",
        "qwen-image-edit": "retouch.models.qwen_image:QwenImageEditModel",
        "qwen-image-edit-plus": "retouch.models.qwen_image:QwenImageEditPlusModel",
        "sd3": "retouch.models.sd3:SD3Model",
        "z-image": "retouch.models.z_image:ZImageModel",
        "flux": "retouch.models.flux:FluxModel",
        "flux-fill": "retouch.models.flux:FluxFillModel",
        "flux-kontext": "retouch.models.flux:FluxKontextModel",
        "flux2-klein": "retouch.models.flux2:Flux2KleinModel",
        "qwen-image-2": "retouch.models.qwen_image_2:QwenImage2Model",
        "pipeline": "retouch.models.any_pipeline:DiffusersPipeline",
        "import": "retouch.models.base:ImportedModel",
    },
    with_wings=True,
)

LANGUAGE_MODELS = Kinds(
    "language_model",
    {
        "qwen-vl": "retouch.models.language:QwenLanguageModel",
        "qwen": "retouch.models.language:QwenLanguageModel",
        "emu3": "retouch.models.language:Emu3Model",
        "janus": "retouch.models.language:JanusModel",
        "import": "retouch.models.base:ImportedLanguageModel",
    },
    with_wings=True,
)
