"""Requests to a vLLM server and the validation of its responses, as token ids (``POST /inference/v1/generate``).

The interface is that of vLLM 0.32 and 0.33. A prompt is sent as the model's own ids with one image token per image, which the
server repeats once per patch. The prompt ids that the server returns must equal the model's. A response with any fault is rejected
as a whole.
"""

import base64
import io
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.policies.engine import TokenSampling
from retouch_serve.engines.grammar import KEY

PLUGIN = "retouch_serve.engines.plugin:GrammarProcessor"
"""The logits processor with which the server is started: ``vllm serve --logits-processors``."""
GENERATE = "/inference/v1/generate"
MAX_BIASED = 1024
"""The largest number of ids that a request may bias."""
_PROBE_TOLERANCE = 1e-3
BAN = -100.0
"""The lowest bias that vLLM accepts: it multiplies a probability by e^-100."""


class InvalidResponse(Exception):
    """A response with a fault, which the message describes."""


class WeightsLost(Exception):
    """The server has other weights than were published, because it was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """The weights that a request names. ``model``: an adapter, None for the base model. ``version``: the version of the weights
    that must have generated every token of a response; None means no check.
    """

    model: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """``count`` completions of one prompt with published weights; completion k is sampled with ``seed + k``.

    ``ids``: the prompt, with one image token per patch. ``images``: data URLs. ``stop``: ids that end a completion. ``banned``: ids
    that are never sampled. ``grammar``: the grammar for the server's plug-in, as JSON; no ids are banned if it is given.
    """

    weights: ServedWeights
    ids: tuple[int, ...]
    image_token: int | None
    images: tuple[str, ...]
    sampling: TokenSampling
    stop: tuple[int, ...]
    banned: Set[int]
    seed: int
    count: int
    grammar: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """The JSON body. It sets every parameter for which the server might have another default."""
        parameters: dict[str, Any] = {
            "n": self.count,
            "seed": self.seed,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k or 0,
            "top_p": 1.0 if self.sampling.top_p is None else self.sampling.top_p,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": self.sampling.max_new_tokens,
            "stop_token_ids": list(self.stop),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
            "logit_bias": {str(token): BAN for token in sorted(self.banned)},
        }
        if self.grammar is not None:
            parameters["extra_args"] = {KEY: self.grammar}
        body = {
            "model": self.weights.model,
            "token_ids": self._collapsed(),
            "sampling_params": parameters,
            "return_token_ids": True,
        }
        return body | ({"content_parts": [{"type": "image_url", "url": url} for url in self.images]} if self.images else {})

    def split(self, most: int) -> list["GenerateRequest"]:
        """Split the request into requests of at most ``most`` completions each."""
        starts = range(0, self.count, most)
        return [replace(self, seed=self.seed + start, count=min(most, self.count - start)) for start in starts]

    def _collapsed(self) -> list[int]:
        """The ids, with each run of image tokens replaced by a single image token."""
        before = (None, *self.ids)
        return [token for last, token in zip(before, self.ids, strict=False) if token != self.image_token or token != last]


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """``ids``: with the end token. ``kept``: the ids that top-k and top-p kept at each position, None without top-k and top-p."""

    ids: list[int]
    log_probs: list[float]
    kept: list[list[int]] | None


def data_url(image: Image) -> str:
    """The image's pixels as a PNG in a data URL."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG", compress_level=1, exif=b"", icc_profile=None)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class _Strict(BaseModel):
    """Checks types strictly, and ignores keys that are not needed."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _TokenLogProb(_Strict):
    token_id: int
    logprob: float


class _LogProbs(_Strict):
    content: list[_TokenLogProb]


class _WeightSpan(_Strict):
    version: str


class _Choice(_Strict):
    index: int
    finish_reason: str | None
    token_ids: list[int] = Field(min_length=1)
    logprobs: _LogProbs
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[_WeightSpan] | None = None


class _Response(_Strict):
    choices: list[_Choice]
    prompt_token_ids: list[int]


def parse_response(body: bytes, request: GenerateRequest, *, vocabulary: int) -> list[ServerCompletion]:
    """The ``count`` completions, in order. ``vocabulary``: ids must be below this number. Raises InvalidResponse for any fault, and
    WeightsLost for another version of the weights."""
    response = _read(body)
    if request.weights.version is not None:
        for choice in response.choices:
            _check_version(choice, request.weights.version)
    if tuple(response.prompt_token_ids) != request.ids:
        raise InvalidResponse(
            f"it read a prompt of {len(response.prompt_token_ids)} ids, which are not the {len(request.ids)} that the policy "
            "reads: the server has another tokenizer or image processor (for example other min_pixels and max_pixels)"
        )
    choices = {choice.index: choice for choice in response.choices}
    if len(response.choices) != request.count or choices.keys() != set(range(request.count)):
        raise InvalidResponse(f"{len(response.choices)} completions, but {request.count} were requested")
    return [_completion(choices[index], request, vocabulary) for index in range(request.count)]


@dataclass(frozen=True, slots=True)
class ServerSampling:
    """How a server reports its samples. ``processed``: log-probabilities are those after bias, temperature, top-k and top-p.
    ``returns_mask``: a response contains the tokens that top-k and top-p kept."""

    processed: bool
    returns_mask: bool


def probe_body(token: int) -> dict[str, Any]:
    """A request that can only sample ``token``, whose processed log-probability is then 0. Valid with and without a mask."""
    parameters = {"max_tokens": 1, "top_k": 1, "temperature": 1.0, "logprobs": 0, "logit_bias": {str(token): -BAN}}
    return {"request_id": "retouch-probe", "token_ids": [0], "sampling_params": parameters, "return_token_ids": True}


def parse_probe(body: bytes, token: int) -> ServerSampling:
    """Parse the response to ``probe_body(token)``. Raises InvalidResponse if it is invalid.

    No model gives probability 1 to each of two tokens, so probes of two tokens always detect raw log-probabilities.
    """
    choices = _read(body).choices
    if [choice.token_ids for choice in choices] != [[token]]:
        raise InvalidResponse("another token than the only one that may be sampled")
    ((value,),) = (_values(choice) for choice in choices)
    return ServerSampling(processed=value > -_PROBE_TOLERANCE, returns_mask=choices[0].sampling_mask is not None)


def _read(body: bytes) -> _Response:
    try:
        return _Response.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidResponse(f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}") from None


def _check_version(choice: _Choice, version: str) -> None:
    if choice.weight_versions is None:
        raise InvalidResponse("it does not report which weights generated it (weight_versions); use vLLM 0.32 or newer")
    if {span.version for span in choice.weight_versions} != {version}:
        raise WeightsLost


def _completion(choice: _Choice, request: GenerateRequest, vocabulary: int) -> ServerCompletion:
    ids, longest = choice.token_ids, request.sampling.max_new_tokens
    if wrong := [token for token in ids if not 0 <= token < vocabulary or token in request.banned]:
        raise InvalidResponse(f"token {wrong[0]}, which cannot be sampled")
    if any(token in request.stop for token in ids[:-1]):
        raise InvalidResponse("a completion goes on after the token that ends it")
    ended = {"stop": ids[-1] in request.stop, "length": len(ids) == longest and ids[-1] not in request.stop}
    if len(ids) > longest or not ended.get(choice.finish_reason or "", False):
        raise InvalidResponse(
            f"a completion of {len(ids)} tokens ends with {choice.finish_reason!r}, and the longest is {longest}; "
            "if it is too short, raise the server's --max-model-len"
        )
    return ServerCompletion(ids, _values(choice), _kept(choice, vocabulary) if request.sampling.truncates else None)


def _values(choice: _Choice) -> list[float]:
    content = choice.logprobs.content
    if [each.token_id for each in content] != choice.token_ids:
        raise InvalidResponse("log-probabilities of other tokens than were generated")
    values = [each.logprob for each in content]
    # The server reports -9999 if it has no log-probability.
    if not all(-9999.0 < value < 1e-3 for value in values):
        raise InvalidResponse("a value that is not a log-probability")
    return values


def _kept(choice: _Choice, vocabulary: int) -> list[list[int]]:
    kept = choice.sampling_mask
    if kept is None:
        raise InvalidResponse("it does not report what top_k and top_p kept; start the server with --return-sampling-mask")
    if len(kept) != len(choice.token_ids) or not all(token in among for token, among in zip(choice.token_ids, kept, strict=True)):
        raise InvalidResponse("the tokens that top_k and top_p kept do not include the sampled tokens")
    if not all(0 <= token < vocabulary for among in kept for token in among):
        raise InvalidResponse("top_k and top_p kept an id that is not a token")
    return [sorted(set(among)) for among in kept]
