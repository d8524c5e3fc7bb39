"""The models that a recipe can name: one row a kind."""

from retouch.config.kinds import Kinds

IMAGE_MODELS = Kinds(
    "image_model",
    {
        "playground": "retouch.playground.models:PlaygroundModel",
        "playground-text-to-image": "retouch.playground.models:PlaygroundTextToImage",
        "playground-words": "retouch.playground.models:PlaygroundWords",
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
    named=["retouch.pretraining.networks.tiny_fill:TinyFluxFill", "retouch.pretraining.networks.tiny_sd3:TinySD3"],
    renamed={"playground-painter": "playground-text-to-image"},
)

LANGUAGE_MODELS = Kinds(
    "language_model",
    {
        "qwen-vl": "retouch.models.qwen_vl.family:QwenLanguageModel",
        "qwen": "retouch.models.qwen_vl.family:QwenLanguageModel",
        "playground-writer": "retouch.playground.language_models:PlaygroundWriter",
        "playground-enhancer": "retouch.playground.language_models:PlaygroundEnhancer",
        "emu3": "retouch.models.emu3.family:Emu3Model",
        "playground-emu3": "retouch.playground.language_models:PlaygroundEmu3",
        "janus": "retouch.models.janus.family:JanusModel",
        "import": "retouch.models.language:ImportedLanguageModel",
    },
)
