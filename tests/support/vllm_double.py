"""A double of a vLLM server, as strict as the interface of vLLM 0.32 and 0.33: a tiny model that loads LoRA folders and samples.

It rejects every field, type and value that the real server rejects. It merges adapters into its own copy of the base weights by
hand, can inject faults, and computes without a cache and without our kernel. ``like_vllm`` compares its answers with the answers of
a real server.
"""

import base64
import copy
import functools
import io
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import loopback
from vllm_runner import LogitsProcessor, Request, Runner

INT64 = Field(ge=-(2**63), le=2**63 - 1)
GENERATE, LOAD, UNLOAD = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Sampling(Strict):
    n: Annotated[int, Field(ge=1, le=16384)] = 1
    seed: Annotated[int, INT64] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=-1, le=20)] | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None
    extra_args: dict[str, Any] | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    url: str


class Generate(Strict):
    request_id: str | None = None
    model: str | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    content_parts: list[ImagePart] | None = None
    sampling_params: Sampling
    return_token_ids: bool | None = None


class Load(Strict):
    lora_name: str
    lora_path: str


class Unload(Strict):
    lora_name: str


class Version(Strict):
    new_version: str


class Paths(Strict):
    weights_path: str


class Rpc(Strict):
    method: Literal["reload_weights"]
    kwargs: Paths


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Double:
    """The server. ``base``: the model that it serves. ``fault``: returns the fault of the next request to a path, or None.

    ``processor``: the class that the flag ``--logits-processors`` names; without it the ``extra_args`` of a request are ignored.
    """

    base: nn.Module
    image_processor: Any = None
    image_token: int | None = None
    version: str = "0.32.0"
    key: str | None = None
    runtime_lora: bool = True
    has_lora: bool = True
    max_num_seqs: int = 64
    scale_out: bool = True
    max_lora_rank: int = 16
    max_model_len: int = 4096
    processed: bool = True
    sampling_mask: bool = False
    processor: type[LogitsProcessor] | None = None
    dev_mode: bool = False
    weight_version: str = "default"
    clears_cache: bool = True
    sleeps: bool = True
    """Whether the server has ``--enable-sleep-mode``; without this flag a sleeping server keeps its memory."""
    asleep: bool = False
    states: list[str] = field(default_factory=list)
    reloaded: list[str] = field(default_factory=list)
    fault: Callable[[str], str | None] = lambda path: None
    adapters: dict[str, nn.Module] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    unloaded: list[str] = field(default_factory=list)
    asked: list[Generate] = field(default_factory=list)
    request_count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, body: bytes) -> Any:
        """Return the document of the answer. Raises Refusal if the request is rejected."""
        match method, path:
            case "GET", "/health":
                return ""
            case "GET", "/version":
                return {"version": self.version}
            case "GET", "/v1/models":
                base = {"id": "base", "object": "model", "owned_by": "vllm", "root": "folder", "max_model_len": self.max_model_len}
                return {"object": "list", "data": [base, *({"id": name, "parent": "base"} for name in self.adapters)]}
            case "POST", "/v1/load_lora_adapter" if self.runtime_lora:
                return self._load(_read(Load, body))
            case "POST", "/v1/unload_lora_adapter" if self.runtime_lora:
                return self._unload(_read(Unload, body))
            case "GET", "/weight_info" if self.dev_mode:
                return {"weight_version": self.weight_version}
            case "POST", "/update_weight_version" if self.dev_mode:
                self.weight_version = _read(Version, body).new_version
                return {"success": True, "new_version": self.weight_version}
            case "POST", "/reset_prefix_cache" if self.dev_mode:
                return {"success": self.clears_cache}
            case "GET", "/is_sleeping" if self.dev_mode:
                return {"is_sleeping": self.asleep}
            case "GET", "/server_info?config_format=json" if self.dev_mode:
                model = {"enable_sleep_mode": self.sleeps}
                return {"vllm_config": {"model_config": model}, "vllm_env": {}, "system_env": {}}
            case "POST", "/sleep?level=1&mode=wait" if self.dev_mode:
                self.asleep = True
                self.states.append("asleep")
                return {"status": "sleeping", "level": 1}
            case "POST", "/wake_up" if self.dev_mode:
                self.asleep = False
                self.states.append("awake")
                return {"status": "awake", "tags": None}
            case "POST", "/collective_rpc" if self.dev_mode:
                return self._reload(_read(Rpc, body))
            case "POST", "/inference/v1/generate":
                if not self.scale_out:
                    raise Refusal(
                        403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
                    )
                return self._generate(_read(Generate, body))
        raise Refusal(404, "Not Found")

    def _load(self, asked: Load) -> str:
        if not asked.lora_name or not asked.lora_path:
            raise Refusal(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if asked.lora_name in self.adapters:
            raise Refusal(
                400, f"The lora adapter '{asked.lora_name}' has already been loaded. If you want to load the adapter in place"
            )
        folder = Path(asked.lora_path)
        if not self.has_lora:
            raise Refusal(500, _worker_failed("LoRA is not enabled. Use --enable-lora to enable LoRA."))
        if not folder.is_absolute() or not (folder / "adapter_config.json").is_file():
            raise Refusal(404, f"Loading lora {asked.lora_name} failed: No adapter found for {asked.lora_path}")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > self.max_lora_rank:
            raise Refusal(500, _worker_failed(f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_lora_rank}."))
        self.adapters[asked.lora_name] = _merged(self.base, config, load_file(folder / "adapter_model.safetensors"))
        self.loaded.append(asked.lora_name)
        return f"Success: LoRA adapter '{asked.lora_name}' added successfully."

    def _unload(self, asked: Unload) -> str:
        if asked.lora_name not in self.adapters:
            raise Refusal(404, f"The lora adapter '{asked.lora_name}' cannot be found.")
        del self.adapters[asked.lora_name]
        self.unloaded.append(asked.lora_name)
        return f"Success: LoRA adapter '{asked.lora_name}' removed successfully."

    def _reload(self, asked: Rpc) -> dict[str, Any]:
        file = Path(asked.kwargs.weights_path) / "model.safetensors"
        if not file.is_file():
            with torch.no_grad():
                for parameter in self.base.parameters():  # as in vLLM, where the parameters then have no data
                    parameter.fill_(torch.nan)
            raise Refusal(500, _worker_failed(f"Repo id must use alphanumeric chars: '{file.parent}'", "collective_rpc"))
        assert isinstance(self.base, PreTrainedModel)
        self.base.load_state_dict(type(self.base).from_pretrained(file.parent).state_dict())
        self.reloaded.append(asked.kwargs.weights_path)
        return {"results": [None]}

    def _generate(self, asked: Generate) -> dict[str, Any]:
        assert not self.asleep, "the server was asked to generate while it was asleep"
        self.states.append("generates")
        module = self.base if asked.model in (None, "base") else self.adapters.get(asked.model)
        if module is None:
            raise Refusal(404, f"The model `{asked.model}` does not exist. Valid aliases: base.")
        how = asked.sampling_params
        vocabulary = self.base.get_output_embeddings().weight.shape[0]
        bias = how.logit_bias or {}
        if len(bias) > 1024 or len(how.stop_token_ids) > 128:
            raise Refusal(400, "Too many tokens")
        if any(not 0 <= token < vocabulary for token in (*bias, *how.stop_token_ids)):
            raise Refusal(400, "out-of-vocab token ids")
        if how.temperature == 0 and how.n > 1:
            raise Refusal(400, f"n must be 1 when using greedy sampling, got {how.n}.")
        if how.n > self.max_num_seqs:
            raise Refusal(400, f"sampling_params.n must be at most the server's max_num_seqs ({self.max_num_seqs}), got {how.n}.")
        if any(token >= vocabulary for token in asked.token_ids):
            raise Refusal(400, f"Token id {max(asked.token_ids)} is out of vocabulary")
        if self.sampling_mask and how.top_k <= 0:
            raise Refusal(500, "")
        if self.processor is not None:
            try:
                self.processor.validate_params(how)
            except ValueError as error:
                raise Refusal(400, str(error)) from None
        if asked.request_id is None:  # requests with an id are probes of the server, not rollouts
            self.asked.append(asked)
        ids, inputs = self._prompt(asked)
        choices = [self._choice(module, ids, inputs, how, index, vocabulary) for index in range(how.n)]
        written = sum(len(choice["token_ids"]) for choice in choices)
        return {
            "request_id": f"generate-tokens-{asked.request_id or 1}",
            "model": asked.model or "base",
            "created": int(time.time()),
            "usage": {
                **{"prompt_tokens": len(ids), "completion_tokens": written, "total_tokens": len(ids) + written},
                **dict.fromkeys(("prompt_tokens_details", "completion_tokens_details")),
            },
            **dict.fromkeys(("prompt_logprobs", "prompt_token_id_logprobs", "mm_placeholders")),
            **dict.fromkeys(("metrics", "kv_transfer_params", "ec_transfer_params")),
            "prompt_token_ids": ids if asked.return_token_ids else None,
            "output_mode": "tokens",
            "choices": choices,
        }

    def _prompt(self, asked: Generate) -> tuple[list[int], dict[str, Tensor]]:
        """Return the ids, with each image token repeated as often as the image has patches, and the inputs of the vision tower."""
        pictures = [_picture(part.url) for part in asked.content_parts or ()]
        if sum(token == self.image_token for token in asked.token_ids) != len(pictures):
            raise Refusal(
                500, f"Expected there to be {len(pictures)} prompt placeholders corresponding to {len(pictures)} image items"
            )
        if not pictures:
            return asked.token_ids, {}
        seen = self.image_processor(images=pictures, return_tensors="pt")
        grids = seen["image_grid_thw"]
        counts = iter((grids.prod(-1) // self.image_processor.merge_size**2).tolist())
        ids = [each for token in asked.token_ids for each in ([token] * (next(counts) if token == self.image_token else 1))]
        return ids, {"pixel_values": seen["pixel_values"], "image_grid_thw": grids}

    def _runner(self, vocabulary: int, request: Request) -> Runner:
        assert self.processor is not None
        runner = Runner(self.processor, slots=1, longest=self.max_model_len, vocabulary=vocabulary)
        runner.add(request)
        return runner

    @torch.no_grad()
    def _choice(
        self, module: nn.Module, prompt: list[int], inputs: dict[str, Tensor], how: Sampling, index: int, vocabulary: int
    ) -> dict[str, Any]:
        random = torch.Generator().manual_seed(0 if how.seed is None else how.seed + index)
        written: list[int] = []
        logged, masks = [], []
        finish = None
        runner = None if self.processor is None else self._runner(vocabulary, Request(prompt, how))
        while finish is None:
            ids = torch.tensor([[*prompt, *written]])
            types = {"mm_token_type_ids": (ids == self.image_token).int()} if inputs else {}
            raw = module(input_ids=ids, **inputs, **types).logits[0, -1].float()
            logits = raw.clone()
            for token, bias in (how.logit_bias or {}).items():
                logits[token] += min(100.0, max(-100.0, bias))
            if runner is not None:
                ((_, logits),) = runner.step(functools.partial(_row_of, logits))
            logits = _truncated(logits / how.temperature, how)
            noise = torch.empty(vocabulary).exponential_(generator=random)
            token = int((logits.softmax(-1) / noise).argmax())
            written.append(token)
            if runner is not None:
                runner.write(runner.active[0], token)
            chances = (logits if self.processed else raw).log_softmax(-1)
            chance = {"token_id": token, "logprob": max(chances[token].item(), -9999.0)}
            chance["rank"] = int((chances > chances[token]).sum()) + 1
            logged.append({**chance, "top_logprobs": [chance]})
            masks.append((logits > -torch.inf).nonzero()[:, 0].tolist())
            if token in how.stop_token_ids:
                finish = "stop"
            elif len(written) == how.max_tokens or len(prompt) + len(written) >= self.max_model_len:
                finish = "length"
        return {
            "index": index,
            "finish_reason": finish,
            "stop_reason": written[-1] if finish == "stop" else None,
            "token_ids": written,
            "routed_experts": None,
            "sampling_mask": masks if self.sampling_mask else None,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(written)}],
            "logprobs": None if how.logprobs is None else {"content": logged},
        }


@torch.no_grad()
def _merged(base: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """Return the base with alpha / r * B A added to the weights that the tensor names identify, in PEFT's naming."""
    assert not config["use_rslora"]
    assert not config["use_dora"]
    merged = copy.deepcopy(base)
    pairs = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    assert len(tensors) == 2 * len(pairs)
    for name in pairs:
        weight = merged.get_submodule(name.removeprefix("base_model.model.")).weight
        weight += config["lora_alpha"] / config["r"] * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    return merged


def _worker_failed(reason: str, method: str = "add_lora") -> str:
    where = "please check the stack trace above for the root cause"
    return f"Call to {method} method failed: Worker failed with error '{reason}', {where}"


def _row_of(logits: Tensor, requests: list[Request]) -> Tensor:
    return logits[None]


def _truncated(logits: Tensor, how: Sampling) -> Tensor:
    """Apply top-k, then top-p, with PyTorch's order of equal logits."""
    order = logits.argsort(descending=True)
    stay = torch.ones(len(logits), dtype=torch.bool)
    if how.top_k > 0:
        stay[order[how.top_k :]] = False
    chances = logits.masked_fill(~stay, -torch.inf)[order].softmax(-1)
    stay[order[chances.cumsum(-1) - chances >= how.top_p]] = False
    return logits.masked_fill(~stay, -torch.inf)


def _picture(url: str) -> Image.Image:
    head, _, data = url.partition(",")
    if head != "data:image/png;base64":
        raise Refusal(400, "The URL must be either a HTTP, data or file URL.")
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["PNG"]).convert("RGB")


def _read(kind: Any, body: bytes) -> Any:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(400, f"1 validation error: {error.errors(include_url=False, include_context=False)[0]}") from None


Change = Callable[[dict[str, Any]], object]


def _with_first(reply: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**reply, "choices": [{**reply["choices"][0], **changes}, *reply["choices"][1:]]}


def _row(reply: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = reply["choices"][0]
    return row


def _logged(reply: dict[str, Any], values: Sequence[object]) -> dict[str, Any]:
    content = [{**each, "logprob": value} for each, value in zip(_row(reply)["logprobs"]["content"], values, strict=True)]
    return _with_first(reply, logprobs={"content": content})


# Changes that make a correct answer wrong.
CHANGES: dict[str, Change] = {
    "another prompt": lambda reply: {**reply, "prompt_token_ids": reply["prompt_token_ids"][1:]},
    "no prompt": lambda reply: {**reply, "prompt_token_ids": None},
    "a missing completion": lambda reply: {**reply, "choices": reply["choices"][1:]},
    "a completion twice": lambda reply: {**reply, "choices": [reply["choices"][0]] * len(reply["choices"])},
    "no ids": lambda reply: _with_first(reply, token_ids=None),
    "an empty completion": lambda reply: _with_first(reply, token_ids=[], logprobs={"content": []}),
    "other ids": lambda reply: _with_first(reply, token_ids=[token ^ 1 for token in _row(reply)["token_ids"]]),
    "an id beyond the vocabulary": lambda reply: _with_first(reply, token_ids=[10**6, *_row(reply)["token_ids"][1:]]),
    "an id that is a string": lambda reply: _with_first(reply, token_ids=["7", *_row(reply)["token_ids"][1:]]),
    "a completion with an additional token": lambda reply: _with_first(
        reply,
        token_ids=[*_row(reply)["token_ids"], 1],
        logprobs={"content": [*_row(reply)["logprobs"]["content"], {"token_id": 1, "logprob": -1.0}]},
    ),
    "aborted": lambda reply: _with_first(reply, finish_reason="abort"),
    "no finish reason": lambda reply: _with_first(reply, finish_reason=None),
    "no log-probabilities": lambda reply: _with_first(reply, logprobs=None),
    "a missing log-probability": lambda reply: _with_first(reply, logprobs={"content": _row(reply)["logprobs"]["content"][1:]}),
    "-9999 as log-probability": lambda reply: _logged(reply, [-9999.0] * len(_row(reply)["token_ids"])),
    "a log-probability above 0": lambda reply: _logged(reply, [0.5] * len(_row(reply)["token_ids"])),
    "a log-probability that is a string": lambda reply: _logged(reply, ["-1"] * len(_row(reply)["token_ids"])),
    "a log-probability that is NaN": lambda reply: _logged(reply, [math.nan] * len(_row(reply)["token_ids"])),
    "no choices": lambda reply: {key: value for key, value in reply.items() if key != "choices"},
    "null": lambda reply: None,
    "log-probabilities off": lambda reply: {
        **reply,
        "choices": [
            {**row, "logprobs": {"content": [{**each, "logprob": each["logprob"] - 0.5} for each in row["logprobs"]["content"]]}}
            for row in reply["choices"]
        ],
    },
}
# Transient faults, which replace the answer.
TRANSIENT_FAULTS = ("503", "502", "429", "hang", "reset", "close mid-body", "forgets its adapters")


class _Handler(loopback.Handler):
    server: "_Server"

    def do_GET(self) -> None:
        self._exchange("GET", b"")

    def do_POST(self) -> None:
        self._exchange("POST", self.body())

    def _exchange(self, method: str, body: bytes) -> None:
        double = self.server.double
        with double.lock:
            double.request_count += 1
            way = double.fault(self.path)
            if way == "forgets its adapters":
                double.adapters.clear()
        if way in TRANSIENT_FAULTS[:-1] or way == "500":
            self._inject_fault(way)
            return
        if double.key is not None and self.headers["Authorization"] != f"Bearer {double.key}":
            self._send(401, {"error": "Unauthorized"})
            return
        try:
            with double.lock:
                answer = double.answer(method, self.path, body)
        except Refusal as refusal:
            self._send(refusal.status, {"error": {"message": str(refusal), "type": "Error", "param": None, "code": refusal.status}})
            return
        self._send(200, CHANGES[way](answer) if way in CHANGES else answer)

    def _inject_fault(self, way: str) -> None:
        self.close_connection = True
        match way:
            case "hang":
                self.server.ended.wait(timeout=30)
            case "reset":
                self.reset()
            case "close mid-body":
                self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"choices"')
            case _:
                self._send(int(way), {"error": {"message": f"told to answer {way}", "type": "Error", "code": int(way)}})

    def _send(self, status: int, document: object) -> None:
        self.reply(status, document.encode() if isinstance(document, str) else document)


class _Server(loopback.Server):
    def __init__(self, double: Double) -> None:
        super().__init__(_Handler)
        self.double, self.ended = double, threading.Event()
        self.broken: list[BaseException | None] = []

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):  # otherwise the client closed the connection
            self.broken.append(error)


@contextmanager
def serving(double: Double) -> Iterator[str]:
    """Run the double and yield its address. AssertionError if the double itself raised an error."""
    server = _Server(double)
    try:
        with loopback.running(server):
            try:
                yield server.url
            finally:
                server.ended.set()
    finally:
        if server.broken:
            raise AssertionError("the double itself is broken") from server.broken[0]


def at_first(*ways: str, path: str = GENERATE) -> Callable[[str], str | None]:
    """Return a ``fault`` with these faults, one per request to ``path``, and no fault afterwards."""
    left = list(ways)
    return lambda asked: left.pop(0) if asked == path and left else None


def always(way: str, path: str = GENERATE) -> Callable[[str], str | None]:
    """Return a ``fault`` with the same fault at every request to ``path``."""
    return lambda asked: way if asked == path else None
