"""The models that a recipe can name: one row per kind."""

from retouch.config.kinds import Kinds

IMAGE_MODELS = Kinds(
    "image_model",
    {
        "qwen-image": "retouch.models.qwen_image.family:QwenImageModel",
        "qwen-image-edit": "retouch.models.qwen_image.family:QwenImageEditModel",
        "qwen-image-edit-plus": "retouch.models.qwen_image.family:QwenImageEditPlusModel",
        "sd3": "retouch.models.sd3.family:SD3Model",
        "z-image": "retouch.models.z_image.family:ZImageModel",
        "flux": "retouch.models.flux.family:FluxModel",
        "flux-fill": "retouch.models.flux.family:FluxFillModel",
        "flux-kontext": "retouch.models.flux.family:FluxKontextModel",
        "flux2-klein": "retouch.models.flux2.family:Flux2KleinModel",
        "qwen-image-2": "retouch.models.qwen_image_2.family:QwenImage2Model",
        "import": "retouch.models.base:ImportedModel",
    },
    renamed={"playground-painter": "playground-text-to-image"},
    with_wings=True,
)

LANGUAGE_MODELS = Kinds(
    "language_model",
    {
        "qwen-vl": "retouch.models.qwen_vl.family:QwenLanguageModel",
        "qwen": "retouch.models.qwen_vl.family:QwenLanguageModel",
        "emu3": "retouch.models.emu3.family:Emu3Model",
        "janus": "retouch.models.janus.family:JanusModel",
        "import": "retouch.models.language:ImportedLanguageModel",
    },
    with_wings=True,
)
