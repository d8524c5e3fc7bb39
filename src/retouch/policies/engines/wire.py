"""What is asked of a vLLM server and what must be true of its answer: ids in, ids out (``POST /inference/v1/generate``).

The interface is that of vLLM 0.33.0. A prompt is sent as the writer's own ids with one image token for each picture, which the
server repeats as often as the picture has patches; the ids that it gives back must be the writer's again. Nothing of an answer that
is wrong somewhere is believed.
"""

import base64
import io
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.policies.autoregressive.decoding import Decoding
from retouch.policies.engines.form import KEY

INTERFACE = "0.33.0"
GENERATE = "/inference/v1/generate"
MOST_BIASED = 1024
"""Ids that a request may bias."""
BAN = -100.0
"""The lowest bias there is: e^-100 of a chance."""


class BadAnswer(Exception):
    """An answer that cannot be believed; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``count`` completions of one prompt by one adapter; completion k is drawn with ``seed + k``.

    ``ids``: with as many image tokens as the writer reads. ``stop`` ends a completion, ``banned`` is never drawn. ``form``: a
    grammar that the server's plug-in is told, with which nothing is banned beside.
    """

    adapter: str
    ids: tuple[int, ...]
    image_token: int | None
    pictures: tuple[str, ...]
    decoding: Decoding
    stop: tuple[int, ...]
    banned: Set[int]
    seed: int
    count: int
    form: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """The request. Everything that the server might else take from a default of its own is said."""
        how = self.decoding
        sampling: dict[str, Any] = {
            "n": self.count,
            "seed": self.seed,
            "temperature": how.temperature,
            "top_k": how.top_k or 0,
            "top_p": 1.0 if how.top_p is None else how.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": how.max_new_tokens,
            "stop_token_ids": list(self.stop),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "logit_bias": {str(token): BAN for token in sorted(self.banned)},
        }
        if self.form is not None:
            sampling["extra_args"] = {KEY: self.form}
        body = {"model": self.adapter, "token_ids": self._contracted(), "sampling_params": sampling, "return_token_ids": True}
        return body | ({"content_parts": [{"type": "image_url", "url": url} for url in self.pictures]} if self.pictures else {})

    def _contracted(self) -> list[int]:
        """The ids with each run of image tokens as one."""
        before = (None, *self.ids)
        return [token for last, token in zip(before, self.ids, strict=False) if token != self.image_token or token != last]


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: its ids with the one that ended it, their log-probabilities, and what top-k and top-p kept at each place."""

    ids: list[int]
    log_probs: list[float]
    kept: list[list[int]] | None


def data_url(image: Image) -> str:
    """The picture's pixels as a PNG in a data URL."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1, exif=b"", icc_profile=None)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class _Read(BaseModel):
    """Types are strict; what else an answer holds is nobody's business here."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Logged(_Read):
    token_id: int
    logprob: float


class _LogProbs(_Read):
    content: list[_Logged]


class _Choice(_Read):
    index: int
    finish_reason: str | None
    token_ids: list[int] = Field(min_length=1)
    logprobs: _LogProbs
    sampling_mask: list[list[int]] | None = None


class _Reply(_Read):
    choices: list[_Choice]
    prompt_token_ids: list[int]


def read(body: bytes, question: Question, *, vocabulary: int) -> list[Answer]:
    """The ``count`` answers, in order. ``vocabulary``: ids are below it. BadAnswer where anything is not as it must be."""
    try:
        reply = _Reply.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadAnswer(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None
    if tuple(reply.prompt_token_ids) != question.ids:
        raise BadAnswer(
            f"it read a prompt of {len(reply.prompt_token_ids)} ids, which are not the {len(question.ids)} that the policy reads: "
            "the server's tokenizer or image processor is another (its sizes min_pixels and max_pixels, say)"
        )
    choices = {choice.index: choice for choice in reply.choices}
    if len(reply.choices) != question.count or choices.keys() != set(range(question.count)):
        raise BadAnswer(f"{len(reply.choices)} completions where {question.count} were asked for")
    return [_answer(choices[index], question, vocabulary) for index in range(question.count)]


def _answer(choice: _Choice, question: Question, vocabulary: int) -> Answer:
    ids, longest = choice.token_ids, question.decoding.max_new_tokens
    if wrong := [token for token in ids if not 0 <= token < vocabulary or token in question.banned]:
        raise BadAnswer(f"token {wrong[0]}, which cannot be drawn")
    if any(token in question.stop for token in ids[:-1]):
        raise BadAnswer("a completion goes on after the token that ends it")
    ended = {"stop": ids[-1] in question.stop, "length": len(ids) == longest and ids[-1] not in question.stop}
    if len(ids) > longest or not ended.get(choice.finish_reason or "", False):
        raise BadAnswer(
            f"a completion of {len(ids)} tokens ends with {choice.finish_reason!r}, and the longest is {longest}; "
            "where it is too short, the server's --max-model-len is"
        )
    logged = choice.logprobs.content
    if [each.token_id for each in logged] != ids:
        raise BadAnswer("log-probabilities of other tokens than were written")
    values = [each.logprob for each in logged]
    # The server writes -9999 where it has none.
    if not all(-9999.0 < value < 1e-3 for value in values):
        raise BadAnswer("a log-probability that is none")
    return Answer(ids, values, _kept(choice, vocabulary) if question.decoding.truncates else None)


def _kept(choice: _Choice, vocabulary: int) -> list[list[int]]:
    kept = choice.sampling_mask
    if kept is None:
        raise BadAnswer("it does not say what top_k and top_p kept; start the server with --return-sampling-mask")
    if len(kept) != len(choice.token_ids) or not all(token in among for token, among in zip(choice.token_ids, kept, strict=True)):
        raise BadAnswer("what top_k and top_p kept does not hold the tokens that were drawn")
    if not all(0 <= token < vocabulary for among in kept for token in among):
        raise BadAnswer("top_k and top_p kept a token that there is not")
    return [sorted(set(among)) for among in kept]
