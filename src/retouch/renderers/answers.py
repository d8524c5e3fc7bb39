"""The system prompt of a model that enhances prompts."""

from importlib.resources import files


def enhancer_prompt() -> str:
    """The system prompt of an enhancer: subject kept, style, lighting, technical terms, concise (system C)."""
    return (files("retouch.renderers") / "texts" / "enhancer.txt").read_text(encoding="utf-8").strip()
