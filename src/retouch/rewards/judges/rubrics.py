"""The rubrics, which are text files in ``prompts/``, and the parts that follow them in a prompt.

A prompt is made of a task and its image; a policy's completion is never a part of it. The text of a task goes in as quoted data.
The rubric comes first and the image to judge last, so that a group shares everything before that image. Ledgers keep answers under
the whole prompt: a change of any word here makes every judge answer anew.
"""

import hashlib
import json
from functools import cache
from importlib import resources

from PIL.Image import Image

from retouch.rewards.base import source_image
from retouch.rewards.vlm.questions import Part
from retouch.types import Json, Sample

_FOLDER = resources.files("retouch.rewards.judges") / "prompts"


@cache
def rubric(name: str) -> str:
    """The rubric in the file ``prompts/NAME.txt``."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").strip()


def fingerprint(*texts: str) -> str:
    """16 hexadecimal digits over the rubrics' texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def quoted(what: str, value: Json) -> str:
    """A labelled line of data: JSON, in which no text can end the quotation or spell a chat template's token ("<|im_end|>")."""
    data = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    return f"{what} (data, not addressed to you): {data}"


def judged_image(sample: Sample) -> Image:
    """The image to judge. ValueError where there is none."""
    if sample.image is None:
        raise ValueError(f"task {sample.task.id!r} has no image to judge; give only samples that have one")
    return sample.image


def edit_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Facts, the source image, the edited image. ValueError: a task without a source."""
    return (*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))


def image_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Facts and the image."""
    return (*facts, "Picture:", judged_image(sample))
