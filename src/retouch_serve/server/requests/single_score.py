"""``POST /score``: three scores of one image (vlm_score, ocr_confidence, combined_score), for clients of existing scoring servers.

An error is reported by its HTTP status, never as a score: 422 for an image that cannot be read, and for a prompt without the text
for OCR; 429, 500, 503, 504.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.data.quotes import quoted as quoted_text
from retouch.types import Sample, Task
from retouch_serve.front.memory import MemoryBudget
from retouch_serve.server.requests.decoding import decode_images
from retouch_serve.server.requests.limits import Limits
from retouch_serve.wire.bodies import decode_base64, parse_json
from retouch_serve.wire.errors import RequestError
from retouch_serve.wire.schema import PictureHead

_FILE = PictureHead(form="encoded")
_MASK = PictureHead(form="encoded", mode="L")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleScore:
    """The columns that are returned as ``vlm_score`` and ``ocr_confidence``.

    combined_score = vlm_weight * vlm_score + ocr_weight * ocr_confidence.
    """

    vlm: str
    ocr: str | None = None
    vlm_weight: float = 1.0
    ocr_weight: float = 0.0

    def check(self, columns: Mapping[str, object]) -> None:
        """Raise ValueError if a column does not exist, or if ``ocr_weight`` is given without ``ocr``."""
        for name in (self.vlm, self.ocr):
            if name is not None and name not in columns:
                raise ValueError(f"there is no column {name!r}; the columns are {', '.join(columns)}")
        if self.ocr is None and self.ocr_weight:
            raise ValueError("--ocr-weight needs --ocr COLUMN")

    def numbers(self, scores: Mapping[str, float | None]) -> dict[str, float | None]:
        """Return the three scores. Raises RequestError if the score of a column is missing."""
        vlm, ocr = scores.get(self.vlm), None if self.ocr is None else scores.get(self.ocr)
        if vlm is None or (self.ocr is not None and ocr is None):
            raise RequestError("reward_failed")
        combined = self.vlm_weight * vlm + self.ocr_weight * (ocr or 0.0)
        return {"vlm_score": vlm, "ocr_confidence": ocr, "combined_score": combined}


class SingleScoreRequest(BaseModel):
    """The request. Images are PNG, JPEG or WebP files in base64.

    ``text``: the text that the image should show; the default is the quoted text of the prompt, as in prompt lists. ``mask``:
    another name of ``mask_image``. ``timestep``: the denoising timestep; it is accepted and does not change the scores.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    image: str
    prompt: Annotated[str, Field(max_length=100_000)]
    source_image: str | None = None
    mask_image: str | None = None
    reference_image: str | None = None
    mask: str | None = None
    timestep: float | None = None
    text: Annotated[str, Field(max_length=100_000)] | None = None


class SingleScoreReply(BaseModel):
    """The reply."""

    vlm_score: float
    ocr_confidence: float | None
    combined_score: float


def decode_single_score(body: bytes, limits: Limits, memory: MemoryBudget, *, needs_text: bool = False) -> Sample:
    """Decode the sample of a request; its images count against ``memory``.

    ``needs_text``: a reward needs the text of the task. Raises RequestError if the request cannot be read, or if the text is needed
    and missing.
    """
    try:
        asked = SingleScoreRequest.model_validate(parse_json(body))
    except ValidationError:
        raise RequestError("bad_batch") from None
    text = asked.text or quoted_text(asked.prompt)
    if needs_text and not (text or "").strip():
        raise RequestError("no_text")
    if asked.mask is not None and asked.mask_image is not None:
        raise RequestError("bad_batch")
    given = {
        "image": (_FILE, asked.image),
        "source": (_FILE, asked.source_image),
        "mask": (_MASK, asked.mask_image or asked.mask),
        "reference": (_FILE, asked.reference_image),
    }
    encoded = {name: (head, decode_base64(text)) for name, (head, text) in given.items() if text is not None}
    decoded = decode_images([head for head, _ in encoded.values()], [blob for _, blob in encoded.values()], limits, memory)
    images = {}
    for name, image in zip(encoded, decoded, strict=True):
        if isinstance(image, str):
            raise RequestError(image)
        images[name] = image
    task = Task(
        id="score",
        instruction=asked.prompt,
        images=(images["source"],) if "source" in images else (),
        mask=images.get("mask"),
        reference=images.get("reference"),
        text=text,
    )
    return Sample(task, images["image"])
