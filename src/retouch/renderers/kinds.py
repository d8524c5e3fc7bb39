"""The renderers that a recipe can choose from, one row a kind."""

from retouch.config.section import Kinds

RENDERERS = Kinds(
    "renderer",
    {
        "prompt": "retouch.renderers.prompts:PromptRenderer",
        "codes": "retouch.renderers.base:CodesRenderer",
    },
    with_wings=True,
)
