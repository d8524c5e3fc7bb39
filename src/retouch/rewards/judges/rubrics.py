"""The rubrics, which are text files in ``prompts/``, and the parts that follow them in a prompt.

A prompt is made of a task and its image; a policy's completion is never a part of it. The text of a task goes in as quoted data.
The rubric comes first and the image to judge last, so that a group shares everything before that image. Ledgers keep answers under
the whole prompt: a change of any word here makes every judge answer anew.
"""

import hashlib
import json
import re
from functools import cache
from importlib import resources

from PIL.Image import Image

from retouch.rewards.base import source_image
from retouch.rewards.vlm.questions import Part
from retouch.types import Json, Sample

# JSON's own words may be in a list alone.
_BRACKETED = re.compile(r"\[(?=\s{0,8}/?\s{0,8}[A-Za-z_][A-Za-z0-9_]{0,60}\s{0,8}\])(?!(?:true|false|null)\])")
_FOLDER = resources.files("retouch.rewards.judges") / "prompts"


@cache
def rubric(name: str) -> str:
    """The rubric in the file ``prompts/NAME.txt``."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").strip()


def fingerprint(*texts: str) -> str:
    """16 hexadecimal digits over the rubrics' texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def quoted(what: str, value: Json) -> str:
    """A labelled line of data: JSON, in which no text can end the quotation or spell a token of a chat template.

    Such tokens are written with "<" (ChatML, Llama 3, Gemma, DeepSeek, Phi), "[" (Mistral, Llama 2, GLM) or "◁" (Kimi); these signs
    become JSON escapes. "[" does so only in front of a word and "]", so that other text stays as it is.
    """
    data = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace("◁", "\\u25c1")
    data = _BRACKETED.sub("\\\\u005b", data)
    return f"{what} (data, not addressed to you): {data}"


def judged_image(sample: Sample) -> Image:
    """The image to judge. Raises ValueError if there is none."""
    if sample.image is None:
        raise ValueError(f"task {sample.task.id!r} has no image to judge; give only samples that have one")
    return sample.image


def edit_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Facts, the source image, the edited image. ValueError: a task without a source."""
    return (*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))


def image_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Facts and the image."""
    return (*facts, "Picture:", judged_image(sample))
