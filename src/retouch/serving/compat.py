"""``POST /score``: one picture, three numbers, for clients that know nothing else: vlm_score, ocr_confidence, combined_score.

Failures have a true status, never a number: 422 for a picture that cannot be read, 429, 500, 503, 504.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.rewards.wire.bodies import decode_base64, parse_json
from retouch.rewards.wire.errors import RequestError
from retouch.rewards.wire.schema import PictureHead
from retouch.serving.decoding import decode_pictures
from retouch.serving.limits import Limits
from retouch.types import Sample, Task

_FILE = PictureHead(form="encoded")
_MASK = PictureHead(form="encoded", mode="L")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compat:
    """Which columns the numbers are. combined_score = vlm_weight * vlm_score + ocr_weight * ocr_confidence."""

    vlm: str
    ocr: str | None = None
    vlm_weight: float = 1.0
    ocr_weight: float = 0.0

    def check(self, columns: Mapping[str, object]) -> None:
        """ValueError where a column is not there, or a weight stands beside none."""
        for name in (self.vlm, self.ocr):
            if name is not None and name not in columns:
                raise ValueError(f"there is no column {name!r}; the rewards give {', '.join(columns)}")
        if self.ocr is None and self.ocr_weight:
            raise ValueError("--ocr-weight needs --ocr COLUMN")

    def numbers(self, scores: Mapping[str, float | None]) -> dict[str, float | None]:
        """The three numbers. RequestError where one that counts could not be judged."""
        vlm, ocr = scores.get(self.vlm), None if self.ocr is None else scores.get(self.ocr)
        if vlm is None or (self.ocr is not None and ocr is None):
            raise RequestError("reward_failed")
        combined = self.vlm_weight * vlm + self.ocr_weight * (ocr or 0.0)
        return {"vlm_score": vlm, "ocr_confidence": ocr, "combined_score": combined}


class Single(BaseModel):
    """The request: pictures as base64 of PNG, JPEG or WebP files."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    image: str
    prompt: Annotated[str, Field(max_length=100_000)]
    source_image: str | None = None
    mask_image: str | None = None
    reference_image: str | None = None
    text: Annotated[str, Field(max_length=100_000)] | None = None


class Numbers(BaseModel):
    """The reply."""

    vlm_score: float
    ocr_confidence: float | None
    combined_score: float


def decode_single(body: bytes, limits: Limits) -> Sample:
    """The sample that the request describes. RequestError where it cannot be read."""
    try:
        asked = Single.model_validate(parse_json(body))
    except ValidationError:
        raise RequestError("bad_batch") from None
    given = {
        "image": (_FILE, asked.image),
        "source": (_FILE, asked.source_image),
        "mask": (_MASK, asked.mask_image),
        "reference": (_FILE, asked.reference_image),
    }
    there = {name: (head, decode_base64(text)) for name, (head, text) in given.items() if text is not None}
    decoded = decode_pictures([head for head, _ in there.values()], [blob for _, blob in there.values()], limits)
    pictures = {}
    for name, picture in zip(there, decoded, strict=True):
        if isinstance(picture, str):
            raise RequestError(picture)
        pictures[name] = picture
    task = Task(
        id="score",
        instruction=asked.prompt,
        images=(pictures["source"],) if "source" in pictures else (),
        mask=pictures.get("mask"),
        reference=pictures.get("reference"),
        text=asked.text,
    )
    return Sample(task, pictures["image"])
