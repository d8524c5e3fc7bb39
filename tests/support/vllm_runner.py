"""A double of the part of vLLM 0.33.0's model runner V2 that calls a custom logits processor, as strict as its interface.

The number of slots is fixed, and a new request gets a slot that still contains the data of the previous request. The order of rows
changes at each step. Prompts are prefilled in chunks, and the samples of unfinished prompts are discarded. Requests are preempted
and resumed in another slot, where the tokens that they had generated belong to the prefill. The objects have only the attributes of
the real objects.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTERFACE = "vllm.v1.worker.gpu.sample.logits_processor"
PLUGIN = "retouch_serve.engines.plugin"


@dataclass(frozen=True)
class LogitsProcRequestState:
    device: torch.device
    max_num_reqs: int
    vocab_size: int
    all_token_ids: Any
    prompt_len: Any
    prefill_len: Any
    total_len: Any


@dataclass(frozen=True)
class LogitsContext:
    expanded_idx_mapping: Tensor
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    expanded_local_pos: Tensor
    input_ids: Tensor
    pos: Tensor
    seq_lens_upper_bound_np: np.ndarray


class LogitsProcessor(ABC):
    """The base class of a plug-in."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:  # noqa: B027
        pass

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: Any) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return True

    def apply_staged_writes(self) -> None:  # noqa: B027
        pass

    @abstractmethod
    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor: ...


def install_plugin(monkeypatch: Any) -> type[LogitsProcessor]:
    """Import the plug-in as vLLM does, with a double of vLLM that has only the names that the plug-in imports."""
    names = INTERFACE.split(".")
    for count in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:count]), ModuleType(".".join(names[:count])))
    sys.modules[INTERFACE].__dict__.update(
        LogitsContext=LogitsContext, LogitsProcessor=LogitsProcessor, LogitsProcRequestState=LogitsProcRequestState
    )
    plugin = importlib.import_module(PLUGIN)
    # Forget the module: after another call its base classes would be outdated.
    del sys.modules[PLUGIN]
    assert issubclass(plugin.GrammarProcessor, LogitsProcessor)
    made: type[LogitsProcessor] = plugin.GrammarProcessor
    return made


@dataclass(eq=False)
class Request:
    """``prefill``: the tokens that are read before the first sampled token counts; ``read``: how many tokens have been read."""

    prompt: list[int]
    params: Any
    written: list[int] = field(default_factory=list)
    prefill: int = 0
    read: int = 0
    slot: int | None = None

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.written]


class Runner:
    """``random`` decides which requests are in the batch, their order and how much is read; None: all, in order, whole prompts."""

    def __init__(
        self,
        processor: type[LogitsProcessor],
        *,
        slots: int,
        longest: int,
        vocabulary: int,
        random: np.random.Generator | None = None,
        speculative: Any = None,
    ) -> None:
        # The data of previous requests: any ids, also ids that begin an image.
        junk = np.random.default_rng(0).integers(0, vocabulary, (slots, longest))
        self.ids = SimpleNamespace(gpu=torch.from_numpy(junk).int())
        self.prompt_len, self.prefill_len = _backed_array(slots), _backed_array(slots)
        self.total_len = SimpleNamespace(gpu=torch.zeros(slots, dtype=torch.int32))
        states = LogitsProcRequestState(
            torch.device("cpu"), slots, vocabulary, self.ids, self.prompt_len, self.prefill_len, self.total_len
        )
        self.processor = processor(SimpleNamespace(speculative_config=speculative), states)  # type: ignore[arg-type]
        self.vocabulary = vocabulary
        self.random = random
        self.free = list(range(slots))
        self.active: list[Request] = []

    def add(self, request: Request) -> None:
        """Give the request the slot that was freed last; the tokens that it has generated are read again."""
        request.slot = self.free.pop()
        request.prefill, request.read = len(request.tokens), 0
        self.prompt_len.np[request.slot] = len(request.prompt)
        self.prefill_len.np[request.slot] = request.prefill
        self.total_len.gpu[request.slot] = request.prefill
        self.ids.gpu[request.slot, : request.prefill] = torch.tensor(request.tokens, dtype=torch.int32)
        needed = self.processor.add_request(request.slot, request.params)
        assert isinstance(needed, bool)
        self.active.append(request)

    def remove(self, request: Request) -> None:
        """Free the slot of a request that has ended or is preempted."""
        assert request.slot is not None
        self.free.append(request.slot)
        request.slot = None
        self.active.remove(request)

    def step(self, logits: Callable[[list[Request]], Tensor]) -> list[tuple[Request, Tensor]]:
        """Return the requests whose next token counts, with their logits (v,); the caller samples and calls ``write``."""
        rows = list(self.active)
        if self.random is not None:
            self.random.shuffle(rows)  # type: ignore[arg-type]
            rows = rows[: max(1, int(len(rows) * self.random.uniform(0.5, 1)))]
        for request in rows:
            left = len(request.tokens) - request.read
            assert left >= 1
            whole = self.random is None or left == 1 or self.random.random() < 0.5
            request.read += left if whole else int(self.random.integers(1, left + 1))  # type: ignore[union-attr]
        slots = torch.tensor([request.slot for request in rows], dtype=torch.int32)
        places = torch.tensor([request.read - 1 for request in rows])
        context = LogitsContext(
            expanded_idx_mapping=slots,
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            expanded_local_pos=torch.zeros(len(rows), dtype=torch.int32),
            input_ids=self.ids.gpu[slots.long(), places],
            pos=places,
            seq_lens_upper_bound_np=(places + 1).numpy().astype(np.int32),
        )
        given = logits(rows)
        self.processor.apply_staged_writes()
        made = self.processor.apply(given.clone(), context)
        assert made.shape == given.shape == (len(rows), self.vocabulary)
        assert made.dtype == torch.float32
        assert not made.isnan().any()
        assert (made > -torch.inf).any(1).all()
        return [(request, row) for request, row in zip(rows, made, strict=True) if request.read == len(request.tokens)]

    def write(self, request: Request, token: int) -> None:
        """Append the sampled token to the request."""
        assert request.slot is not None
        assert 0 <= token < self.vocabulary
        self.ids.gpu[request.slot, len(request.tokens)] = token
        request.written.append(token)
        self.total_len.gpu[request.slot] += 1


def _backed_array(slots: int) -> Any:
    array = np.zeros(slots, dtype=np.int32)
    return SimpleNamespace(np=array, gpu=torch.from_numpy(array), cpu=torch.from_numpy(array))


def params(**extra: Any) -> Any:
    """Return sampling parameters with these ``extra_args``."""
    return SimpleNamespace(extra_args=extra or None)
