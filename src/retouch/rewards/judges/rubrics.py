"""The rubrics, which are text files in ``prompts/``, and the parts that follow a rubric in a prompt.

A prompt contains a task and its image. Only the prompts of the reward ``completion_quality`` contain a policy's completion. The
texts of a task and of a completion are inserted as quoted data. The rubric comes first and the image to judge last, so that the
prompts of a group share everything before that image. Ledgers store answers under the whole prompt: if any word here changes,
stored answers are not found, and every judge is asked again.
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

# The JSON constants true, false and null are exempt: they may be the only entry of a list.
_BRACKETED = re.compile(r"\[(?=\s{0,8}/?\s{0,8}[A-Za-z_][A-Za-z0-9_]{0,60}\s{0,8}\])(?!(?:true|false|null)\])")
_FOLDER = resources.files("retouch.rewards.judges") / "prompts"


@cache
def rubric(name: str) -> str:
    """Read the rubric in the file ``prompts/NAME.txt``."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").strip()


def fingerprint(*texts: str) -> str:
    """Return a hash of the rubrics' texts, 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def quoted(what: str, value: Json) -> str:
    """Return a labelled line of data as JSON, in which no text can end the quotation or contain a token of a chat template.

    Such tokens contain "<" (ChatML, Llama 3, Gemma, DeepSeek, Phi), "[" (Mistral, Llama 2, GLM) or "◁" (Kimi); these characters
    are replaced by JSON escapes. "[" is replaced only before a word and "]", so that other text does not change.
    """
    data = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace("◁", "\\u25c1")
    data = _BRACKETED.sub("\\\\u005b", data)
    return f"{what} (data, not addressed to you): {data}"


def judged_image(sample: Sample) -> Image:
    """Return the image to judge. Raises ValueError if there is none."""
    if sample.image is None:
        raise ValueError(f"task {sample.task.id!r} has no image to judge; pass only samples with an image")
    return sample.image


def edit_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Return the facts, the source image and the edited image. Raises ValueError if the task has no source image."""
    return (*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))


def image_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Return the facts and the image."""
    return (*facts, "Picture:", judged_image(sample))
