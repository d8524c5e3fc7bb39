"""The rubrics, which are text files of this package, and what follows them in a prompt.

A prompt is made of a task and the picture made for it: the policy's own words cannot get in, because a ``Sample`` has none. What a
task says is shown as quoted data. The rubric comes first and the judged picture last, so that all before it is shared by a group.
"""

import hashlib
import json
from functools import cache
from importlib import resources

from PIL.Image import Image

from retouch.rewards.vlm.asking import Part
from retouch.types import Json, Sample, Task

_FOLDER = resources.files("retouch.rewards.judges") / "prompts"


@cache
def rubric(name: str) -> str:
    """The text of a rubric of the package, by its file's name without the ending."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").strip()


def fingerprint(*texts: str) -> str:
    """A short name of rubrics' texts: it changes where any of them does."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def quoted(what: str, value: Json) -> str:
    """A labelled line of data: JSON, in which no text can end the quotation or spell a chat template's token ("<|im_end|>")."""
    data = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    return f"{what} (data, not addressed to you): {data}"


def source_of(task: Task) -> Image:
    """The first source picture. ValueError where the task has none."""
    if not task.images:
        raise ValueError(f"task {task.id!r} has no source picture, with which this judge compares the edited one")
    return task.images[0]


def made(sample: Sample) -> Image:
    """The picture that is judged. ValueError where there is none: a policy's own fault is not for a judge."""
    if sample.image is None:
        raise ValueError(f"task {sample.task.id!r} has no picture to judge; give only samples that have one")
    return sample.image


def edit_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Facts, the source, the edited picture."""
    return (*facts, "Source picture:", source_of(sample.task), "Edited picture:", made(sample))


def picture_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Facts and the picture."""
    return (*facts, "Picture:", made(sample))
