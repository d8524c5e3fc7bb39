"""Requests to a vLLM server and the validation of its responses, as token ids (``POST /inference/v1/generate``).

The interface is that of vLLM 0.32 and 0.33. A prompt is sent as the model's own ids with one image token per image, which the
server repeats once per patch. The prompt ids that the server returns must equal the model's. A response with any fault is rejected
as a whole.
"""

import base64
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retouch.policies.engine import EngineFault, TokenSampling
from retouch.records.files import png
from retouch_serve.engines.client import Client, InvalidResponse, RequestRefused
from retouch_serve.engines.grammar import KEY

PLUGIN = "retouch_serve.engines.plugin:GrammarProcessor"
"""The logits processor with which the server is started: ``vllm serve --logits-processors``."""
GENERATE = "/inference/v1/generate"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
RPC, VERSION, SET_VERSION, RESET = "/collective_rpc", "/weight_info", "/update_weight_version", "/reset_prefix_cache"
MAX_BIASED = 1024
"""The largest number of ids that a request may bias."""
_PROBE_TOLERANCE = 1e-3
BAN = -100.0
"""The lowest bias that vLLM accepts: it multiplies a probability by e^-100."""


class WeightsLost(Exception):
    """The server has other weights than were published, because it was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """``count`` completions of one prompt; completion k is sampled with ``seed + k``.

    ``model``: an adapter, None for the base model. ``version``: the version of the weights that must have generated every token of
    the response; None means no check. ``ids``: the prompt, with one image token per patch. ``images``: data URLs. ``stop``: ids
    that end a completion. ``banned``: ids that are never sampled. ``grammar``: the grammar for the server's plug-in, as JSON; no
    ids are banned if it is given.
    """

    model: str | None = None
    version: str | None = None
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
        # Each run of image tokens is sent as a single one, which the server repeats.
        before = (None, *self.ids)
        body = {
            "model": self.model,
            "token_ids": [
                token for last, token in zip(before, self.ids, strict=False) if token != self.image_token or token != last
            ],
            "sampling_params": parameters,
            "return_token_ids": True,
        }
        return body | ({"content_parts": [{"type": "image_url", "url": url} for url in self.images]} if self.images else {})

    def split(self, most: int) -> list["GenerateRequest"]:
        """Split the request into requests of at most ``most`` completions each."""
        starts = range(0, self.count, most)
        return [replace(self, seed=self.seed + start, count=min(most, self.count - start)) for start in starts]


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """``ids``: with the end token. ``kept``: the ids that top-k and top-p kept at each position, None without top-k and top-p."""

    ids: list[int]
    log_probs: list[float]
    kept: list[list[int]] | None


def data_url(image: Image) -> str:
    """The image's pixels as a PNG in a data URL."""
    return "data:image/png;base64," + base64.b64encode(png(image.convert("RGB"))).decode()


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
    for choice in response.choices if request.version is not None else ():
        if choice.weight_versions is None:
            raise InvalidResponse("it does not report which weights generated it (weight_versions); use vLLM 0.32 or newer")
        if {span.version for span in choice.weight_versions} != {request.version}:
            raise WeightsLost
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


def _read(body: bytes) -> _Response:
    try:
        return _Response.model_validate_json(body)
    except ValidationError as error:
        raise InvalidResponse(_first_error(error)) from None


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
    if not request.sampling.truncates:
        return ServerCompletion(ids, _values(choice), None)
    kept = choice.sampling_mask
    if kept is None:
        raise InvalidResponse("it does not report what top_k and top_p kept; start the server with --return-sampling-mask")
    if len(kept) != len(ids) or not all(token in among for token, among in zip(ids, kept, strict=True)):
        raise InvalidResponse("the tokens that top_k and top_p kept do not include the sampled tokens")
    if not all(0 <= token < vocabulary for among in kept for token in among):
        raise InvalidResponse("top_k and top_p kept an id that is not a token")
    return ServerCompletion(ids, _values(choice), [sorted(set(among)) for among in kept])


def _values(choice: _Choice) -> list[float]:
    content = choice.logprobs.content
    if [each.token_id for each in content] != choice.token_ids:
        raise InvalidResponse("log-probabilities of other tokens than were generated")
    values = [each.logprob for each in content]
    # The server reports -9999 if it has no log-probability.
    if not all(-9999.0 < value < 1e-3 for value in values):
        raise InvalidResponse("a value that is not a log-probability")
    return values


# What a server serves, and which of the required endpoints it has

_NO_ADAPTER = "retouch-probe-of-no-adapter"


class ModelCard(_Strict):
    """A served model. ``root``: the source of its weights. ``parent``: the base model of an adapter, None for a base model."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(_Strict):
    data: list[ModelCard]


class _Version(_Strict):
    version: str


@dataclass(frozen=True, slots=True)
class EngineServerInfo:
    """``base``: the base model. ``loads_adapters``: adapters can be loaded at run time. ``has_lora``: the server was started with
    LoRA. ``reloads``: all weights can be reloaded at run time. ``takes_ids``: the server accepts and returns token ids."""

    version: str
    base: ModelCard
    loads_adapters: bool
    has_lora: bool
    reloads: bool
    takes_ids: bool


def query_server(client: Client) -> EngineServerInfo:
    """Ask what the server can do; changes nothing on it. Raises EngineFault if it does not answer like vLLM."""
    try:
        version = _parse(client.get("/version"), _Version).version
        bases = [card for card in _parse(client.get("/v1/models"), _Models).data if card.parent is None]
        if not bases:
            raise EngineFault(f"{client.url} serves no model")
        # An endpoint that exists refuses an empty body.
        loads = client.refusal(LOAD, {"lora_name": "", "lora_path": ""}) in (400, 422)
        # Without --enable-lora, vLLM cannot add any adapter (HTTP 500).
        probe = {"lora_name": _NO_ADAPTER, "lora_path": f"/{_NO_ADAPTER}"}
        return EngineServerInfo(
            version,
            bases[0],
            loads_adapters=loads,
            has_lora=loads and client.refusal(LOAD, probe, tries_of_500=1) != 500,
            reloads=client.refusal(VERSION) is None,
            takes_ids=client.refusal(GENERATE, {}) in (400, 422),
        )
    except RequestRefused as refused:
        raise EngineFault(f"{client.url} refuses: {refused}") from None


def query_sampling(client: Client) -> ServerSampling:
    """Ask how the server reports its samples; generates two tokens. Raises EngineFault if it refuses, or answers anything else.

    Each request can only sample one token, whose processed log-probability is then 0. No model gives probability 1 to each of two
    tokens, so this always detects raw log-probabilities.
    """
    processed = returns_mask = True
    try:
        for token in (0, 1):
            # Valid with and without a mask.
            parameters = {"max_tokens": 1, "top_k": 1, "temperature": 1.0, "logprobs": 0, "logit_bias": {str(token): -BAN}}
            body = {"request_id": "retouch-probe", "token_ids": [0], "sampling_params": parameters, "return_token_ids": True}
            choices = _read(client.post(GENERATE, body)).choices
            if [choice.token_ids for choice in choices] != [[token]]:
                raise InvalidResponse("another token than the only one that may be sampled")
            (value,) = _values(choices[0])
            processed = processed and value > -_PROBE_TOLERANCE
            returns_mask = returns_mask and choices[0].sampling_mask is not None
    except RequestRefused as refused:
        raise EngineFault(f"{client.server} refuses to generate: {refused}") from None
    except InvalidResponse as invalid:
        raise EngineFault(f"{client.server} gave an invalid response: {invalid}") from None
    return ServerSampling(processed, returns_mask)


def has_plugin(client: Client) -> bool:
    """Whether the server has the plug-in for image tokens, which refuses an invalid grammar; other servers ignore a grammar."""
    parameters = {"max_tokens": 1, "top_k": 1, "extra_args": {KEY: {}}}
    try:
        client.post(GENERATE, {"request_id": "retouch-probe", "token_ids": [0], "sampling_params": parameters})
    except RequestRefused as refused:
        return KEY in refused.text
    return False


def _parse(body: bytes, kind: Any) -> Any:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise EngineFault(f"the server at this address is not vLLM: {_first_error(error)}") from None


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"
