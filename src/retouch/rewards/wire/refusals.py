"""What a reward server says when it does not score: a fixed code, status and text for each case.

Texts never hold anything that came in or that a library said, so nothing of the machine or of other callers leaks through them.
"""

from typing import Literal, TypeAlias, get_args

Code: TypeAlias = Literal[
    "bad_body",
    "bad_batch",
    "unsupported",
    "too_large",
    "too_many",
    "too_slow",
    "unauthorized",
    "not_found",
    "bad_method",
    "bad_deadline",
    "not_configured",
    "busy",
    "draining",
    "deadline",
    "internal",
    "bad_picture",
    "reward_failed",
    "reward_disagrees",
]

TEXTS: dict[Code, tuple[int, str]] = {
    "bad_body": (400, "the body cannot be read as what its content type says"),
    "bad_batch": (422, "the batch does not follow the schema in /openapi.json"),
    "unsupported": (415, "send multipart/form-data, application/msgpack or application/json, without a content encoding"),
    "too_large": (413, "the body is larger than /v1/info allows; send fewer or smaller pictures at once"),
    "too_many": (413, "more items or pictures than /v1/info allows; send fewer at once"),
    "too_slow": (408, "the body did not arrive in time; send it again"),
    "unauthorized": (401, "this server needs its token: Authorization: Bearer TOKEN"),
    "not_found": (404, "there is no such page; see /openapi.json"),
    "bad_method": (405, "this page takes another method; see /openapi.json"),
    "bad_deadline": (400, "X-Deadline-Seconds is a number of seconds above 0"),
    "not_configured": (404, "/score needs a column to answer with: start the server with --vlm COLUMN"),
    "busy": (429, "the queue is full; try again after Retry-After seconds"),
    "draining": (503, "this server is stopping; ask another one"),
    "deadline": (504, "the deadline passed before the scores were there"),
    "internal": (500, "the server failed; its log says how, under this request id"),
    "bad_picture": (
        422,
        "a picture is no PNG, JPEG or WebP of one frame, no raw pixels of its size, or larger than /v1/info allows",
    ),
    "reward_failed": (500, "the reward failed on this item; the server's log says how"),
    "reward_disagrees": (500, "the reward gave something else than the columns and ranges that it declares"),
}
assert set(TEXTS) == set(get_args(Code))


class Refused(ValueError):
    """Why a request, or one item of it, is not scored."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.status, self.text = TEXTS[code]
        super().__init__(self.text)
