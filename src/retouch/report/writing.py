"""What a policy wrote for a picture, as the report shows it."""

from collections.abc import Mapping
from typing import Any

from retouch.records.folder import RunFolder
from retouch.renderers.answers import answer_in
from retouch.report.markup import Html, join, tag
from retouch.rewards.text.prompt_quality import prompt_quality


def rewrites_prompts(folder: RunFolder) -> bool:
    """Whether what is written is a prompt for an image model, in place of the one that was asked for."""
    renderer = folder.read_recipe()["recipe"].get("renderer")
    return isinstance(renderer, Mapping) and renderer.get("kind") == "prompt"


def written(line: Mapping[str, Any], *, label: str, rewrites: bool) -> Html | None:
    """The text of a sample's line; of a prompt also how it differs from what was asked for. None where nothing is written."""
    if line.get("text") is None:
        return None
    text = str(line["text"])
    head = tag("span", f"{label} ", class_="quiet") if label else None
    shown = tag("p", head, text or "(nothing)", class_="written", dir="auto")
    return join([shown, tag("p", _told(str(line["instruction"]), text), class_="told quiet")]) if rewrites else shown


def _told(original: str, text: str) -> str:
    prompt = answer_in(text)
    if prompt is None:
        return "no prompt in it"
    quality = prompt_quality(original, prompt)
    before, after = len(original.split()), len(prompt.split())
    return f"{before} → {after} word{'s' * (after != 1)}, prompt quality {quality.total:.1f} of 5"
