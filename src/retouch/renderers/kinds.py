"""The renderers that a recipe can name: one row per kind."""

from retouch.config.kinds import Kinds

RENDERERS = Kinds(
    "renderer",
    {
        "response": "retouch.renderers.responses:ResponseRenderer",
        "prompt": "retouch.renderers.prompts:PromptRenderer",
        "codes": "retouch.renderers.decoders:CodesRenderer",
    },
)
