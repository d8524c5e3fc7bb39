"""The request and the reply of a chat completion of an OpenAI-compatible server.

Images are sent as lossless data URLs, so that a judge sees exactly the pixels that the policy made.
"""

import base64
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from PIL.Image import Image
from pydantic import BaseModel, Field, ValidationError

from retouch.rewards.vlm.forms import JudgeReply, first_tokens
from retouch.rewards.vlm.questions import Part, Question

_WEBP_LIMIT = 16383  # largest side in pixels of the WebP format
_PIXELS_PER_TOKEN = 28 * 28
_TEMPLATE_TOKENS, _SPARE_TOKENS = 4096, 64  # tokens that a server may count in addition to the inputs, and to the answer
# The request field of vLLM 0.11 and later, and its older name, which vLLM 0.12 has dropped.
Guided: TypeAlias = Literal["structured_outputs", "guided_choice"]


class _Token(BaseModel):
    token: Annotated[str, Field(max_length=1000)]
    logprob: Annotated[float, Field(ge=-1e9, le=1e-3, allow_inf_nan=False)]


class _Place(_Token):
    top_logprobs: Annotated[list[_Token], Field(max_length=1000)] = Field(default_factory=list)


class _Logprobs(BaseModel):
    content: Annotated[list[_Place], Field(max_length=10_000)] | None = None


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one attempt. ``estimated``: the numbers are estimates, because the server's count is missing or impossible."""

    input: int
    output: int
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A reply, and the number of tokens that the server reports: (input, output), None if it reports none."""

    reply: JudgeReply
    usage: tuple[int, int] | None


def parse_reply(body: str | bytes) -> Received | None:
    """Parse the body of a completion with one choice; None if the body is truncated, empty, not JSON, or of another format."""
    try:
        completion = _Completion.model_validate_json(body)
    except ValidationError:
        return None
    choice = completion.choices[0]
    usage = completion.usage
    reply = JudgeReply(
        text=choice.message.content or "",
        finished=choice.finish_reason or "",
        refused=bool(choice.message.refusal) or choice.finish_reason == "content_filter",
        first=_first(choice.logprobs),
    )
    return Received(reply, None if usage is None else (usage.prompt_tokens, usage.completion_tokens))


def tokens_of(question: Question, received: Received) -> Tokens:
    """Return the tokens of an attempt: the server's count if it is possible for this question and answer, otherwise an estimate.

    A count is possible if a token stands for 1 to 64 bytes of text, or for at least 64 pixels. A server may add a template to the
    input, and reasoning to the output, up to the form's ``max_tokens``. The estimate is one token per 4 bytes of text and per
    28 x 28 pixels.
    """
    texts = [question.rubric, *(part for part in question.parts if isinstance(part, str))]
    sent = sum(len(text.encode("utf-8", "replace")) for text in texts)
    pixels = [part.width * part.height for part in question.parts if not isinstance(part, str)]
    written = len(received.reply.text.encode("utf-8", "replace"))
    if received.usage is not None:
        inputs, outputs = received.usage
        most = sent + sum(size // 64 for size in pixels) + _TEMPLATE_TOKENS * (len(question.parts) + 1)
        least = max(1, sent // 64), written // 64 + bool(written)
        if least[0] <= inputs <= most and least[1] <= outputs <= question.form.max_tokens + _SPARE_TOKENS:
            return Tokens(inputs, outputs)
    estimate = sent // 4 + sum(size // _PIXELS_PER_TOKEN + 1 for size in pixels)
    return Tokens(estimate + 1, min(written // 4 + 1, question.form.max_tokens), estimated=True)


def _first(logprobs: _Logprobs | None) -> dict[str, float]:
    """Return the candidates for the first token, with log-probabilities. A server may list a token twice, for example as bytes."""
    if logprobs is None or not logprobs.content:
        return {}
    return first_tokens((token.token, token.logprob) for token in logprobs.content[0].top_logprobs)


def request(question: Question, *, typed: bool, urls: Mapping[int, str], guided: Guided | None = None) -> dict[str, Any]:
    """Return the fields of a request, without model and seed.

    ``typed``: add the form's JSON schema, if it has one. ``guided``: the request field for the list of possible answers, which is
    used if the form has such a list. ``urls``: the data URLs of images, by ``id()``.
    """
    fields: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": question.rubric},
            {"role": "user", "content": [_part(part, urls) for part in question.parts]},
        ],
        "temperature": question.temperature,
        "max_completion_tokens": question.form.max_tokens,
    }
    schema, choices = question.form.schema(), list(question.form.choices())
    if schema is None:
        fields |= {"logprobs": True, "top_logprobs": 20}
    elif choices and guided is not None:
        fields["extra_body"] = {"guided_choice": choices} if guided == "guided_choice" else {guided: {"choice": choices}}
    elif typed:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": schema}}
    return fields


def data_urls(questions: Sequence[Question]) -> dict[int, str]:
    """Return the data URL of every image in the questions, by ``id()``; each image is encoded once."""
    urls: dict[int, str] = {}
    for question in questions:
        for part in question.parts:
            if not isinstance(part, str) and id(part) not in urls:
                urls[id(part)] = data_url(part)
    return urls


def digest(fields: Mapping[str, Any]) -> str:
    """Return a short hash of a request; equal requests have equal hashes."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def _part(part: Part, urls: Mapping[int, str]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": urls[id(part)]}}


def data_url(image: Image) -> str:
    """Encode the image in RGB as a base64 data URL, in lossless WebP (PNG if it is larger than WebP allows)."""
    form = "PNG" if max(image.size) > _WEBP_LIMIT else "WEBP"
    settings = {"compress_level": 1} if form == "PNG" else {"lossless": True, "quality": 0, "method": 0}
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, form, **settings)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
