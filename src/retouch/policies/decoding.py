"""Decoding with the policy's own model and a key-value cache, and the log-probabilities of its tokens.

Each token of a row is sampled by inversion from a uniform random number of its own, which is drawn on the CPU and keyed by (seed,
step, group, slot) and the position of the token. So a completion does not depend on the other rows of its batch.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retouch.core.random import generator
from retouch.core.tokens import entropy, log_prob, mask_to_ids, sample_tokens, top_k_top_p_mask, warp_logits
from retouch.models.quantized import compute_dtype
from retouch.policies.engine import Generation, TokenSampling
from retouch.protocols import AutoregressiveModel, Grammar
from retouch.types import Batch, Prompts, Trajectory


def allowed_ids(grammar: Grammar, vocabulary: Int[Tensor, " n"]) -> Bool[Tensor, "#n v"]:
    """The mask of ids that may be sampled at each position, by the index of its vocabulary; one row if there is only one."""
    return grammar.vocabularies if len(grammar.vocabularies) == 1 else grammar.vocabularies[vocabulary]


def token_log_probs(
    model: AutoregressiveModel,
    module: nn.Module,
    states: Float[Tensor, "n d"],
    ids: Int[Tensor, " n"],
    *,
    vocabulary: Int[Tensor, " n"],
    support: Int[Tensor, "n w"] | None,
    temperature: float,
    chunk: int,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"] | None]:
    """The log-probability of each id in nats and, with ``with_entropy``, the entropy of its distribution; fp32, with gradient
    unless gradients are disabled.

    The language-model head runs on ``chunk`` tokens at a time and again in the backward pass (gradient checkpointing), so memory
    grows with chunk * vocabulary and not with rows * length * vocabulary. Tokens that were not sampled never reach the head.

    ``vocabulary``: the index of the grammar's vocabulary from which each id is sampled. ``support``: the ids of this vocabulary
    that top-k and top-p kept, padded with -1.
    """

    def head(states: Tensor, ids: Tensor, vocabulary: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor | None]:
        logits = warp_logits(model.logits(module, states), allowed_ids(model.grammar, vocabulary), temperature=temperature)
        return log_prob(logits, ids, support=support), entropy(logits, support=support) if with_entropy else None

    log_probs, entropies = [], []
    for start in range(0, len(ids), chunk):
        part = slice(start, start + chunk)
        arguments = (states[part], ids[part], vocabulary[part], None if support is None else support[part])
        log_probs_of_part, entropies_of_part = checkpoint(head, *arguments, use_reentrant=False, preserve_rng_state=False)
        log_probs.append(log_probs_of_part)
        entropies.append(entropies_of_part)
    if not log_probs:
        # Rows without a sampled token still take part in the backward pass, because all ranks must run equally many.
        zero = states.float().sum(-1)
        return zero, zero if with_entropy else None
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def allowed_log_probs(
    model: AutoregressiveModel,
    module: nn.Module,
    states: Float[Tensor, "n d"],
    *,
    grammar: Grammar,
    vocabulary: Int[Tensor, " n"],
    temperature: float,
) -> Float[Tensor, "n v"]:
    """The log-probabilities of all ids of a grammar, -inf for those that it does not allow; other arguments as for
    ``token_log_probs``. The model may have more or fewer ids that no grammar allows, as models of one family do."""
    logits = model.logits(module, states)
    if padding := grammar.vocabularies.shape[1] - logits.shape[1]:
        logits = nn.functional.pad(logits, (0, padding))
    logits = warp_logits(logits, allowed_ids(grammar, vocabulary), temperature=temperature)
    return logits.log_softmax(-1)


def token_kl(
    model: AutoregressiveModel,
    module: nn.Module,
    states: Float[Tensor, "n d"],
    taught: Float[Tensor, "n v"],
    *,
    vocabulary: Int[Tensor, " n"],
    temperature: float,
    chunk: int,
    forward: bool,
) -> Float[Tensor, " n"]:
    """KL(policy, teacher), or with ``forward`` KL(teacher, policy), in nats over all ids that may follow, with gradient.

    Other arguments as for ``token_log_probs``. ``taught``: the log-probabilities of the teacher (``allowed_log_probs``).
    """

    def head(states: Tensor, taught: Tensor, vocabulary: Tensor) -> Tensor:
        log_probs = allowed_log_probs(model, module, states, grammar=model.grammar, vocabulary=vocabulary, temperature=temperature)
        first, second = (taught, log_probs) if forward else (log_probs, taught)
        # -inf minus -inf is NaN, which a product with the probability 0 would not remove.
        return (first.exp() * (first - second).masked_fill(first.isneginf(), 0.0)).sum(-1)

    parts = [slice(start, start + chunk) for start in range(0, len(states), chunk)]
    found = [
        checkpoint(head, states[part], taught[part], vocabulary[part], use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    return torch.cat(found) if found else states.float().sum(-1)  # see ``token_log_probs``


def scatter(values: Float[Tensor, " n"], mask: Bool[Tensor, "r t"]) -> Float[Tensor, "r t"]:
    """``values`` at the places where ``mask`` is True, row by row, and 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


CHECK_EVERY = 16
"""Number of tokens after which the host asks the device whether rows have ended; not on the CPU."""
ROOM = 256
"""Number of tokens for which a static cache has room. Then it is copied into one with more room, without rows that have ended."""


_COLUMNS = ("log_probs", "mask", "kind", "ids", "lengths", "vocabulary", "values", "behaviour_log_probs")
"""The tensors of a trajectory with one row per sample; the last two may be None."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AutoregressiveTrajectory(Trajectory):
    """``ids``: without the prompt, ``pad`` after the end. ``lengths``: number of tokens of each row, including its end token.

    ``vocabulary``: the index of the grammar's vocabulary at each position. ``support``: the ids that top-k and top-p kept there,
    padded with -1. ``group``: for each row, the index of its task in ``prompts``. ``outputs``: one ``Completion`` per row.
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    vocabulary: Int[Tensor, "b t"]
    support: Int[Tensor, "b t w"] | None
    prompts: Prompts
    group: Int[Tensor, " b"]

    def take(self, rows: slice | Int[Tensor, " r"]) -> "AutoregressiveTrajectory":
        outputs = self.outputs[rows] if isinstance(rows, slice) else tuple(self.outputs[row] for row in rows.tolist())
        columns = {name: getattr(self, name) for name in (*_COLUMNS, "support", "group")}
        return replace(self, outputs=outputs, **{name: each[rows] for name, each in columns.items() if each is not None})

    @classmethod
    def concat(cls, parts: "Sequence[AutoregressiveTrajectory]") -> "AutoregressiveTrajectory":  # type: ignore[override]
        groups, tasks = [], 0
        for part in parts:
            groups.append(part.group + tasks)
            tasks += len(part.prompts)
        supports = [part.support for part in parts if part.support is not None]
        width = max((support.shape[2] for support in supports), default=0)
        supports = [nn.functional.pad(support, (0, width - support.shape[2]), value=-1) for support in supports]
        columns = {name: [column for part in parts if (column := getattr(part, name)) is not None] for name in _COLUMNS}
        return cls(
            **{name: torch.cat(found) if found else None for name, found in columns.items()},  # type: ignore[arg-type]
            outputs=tuple(completion for part in parts for completion in part.outputs),
            support=torch.cat(supports) if supports else None,
            prompts=Prompts.concat([part.prompts for part in parts]),
            group=torch.cat(groups),
        )


def log_prob_difference(
    policy: Float[Tensor, "b t"], engine: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, " n"]:
    """log p_policy - log p_engine of each sampled token, in nats."""
    return (policy - engine)[mask]


@runtime_checkable
class HasStaticCache(Protocol):
    """A language model with a static cache, whose tensors have room for further tokens."""

    def static_cache(self, cache: object, rows: Int[Tensor, " r"], *, room: int) -> object:
        """Move these rows of a cache, which is empty afterwards, into tensors with room for ``room`` more tokens."""
        ...


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: for each stream, cuBLAS keeps memory of its own."""
    return torch.cuda.Stream(device)


def cuda_graph(call: Callable[[], Tensor], before: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture the kernels of a call, without running them. ``replay()`` of the graph runs them on the memory that the call read,
    and writes the returned tensor. ``before``: an earlier graph or None; it is no longer replayed, and this one takes its memory.
    """
    graph = torch.cuda.CUDAGraph()
    pool = None if before is None else before.pool()
    # Rewards may use the GPU in other threads, which the default mode forbids. The outer stream is there because a capture that
    # fails leaves its own stream as the current one.
    with (
        torch.cuda.device(device),
        torch.cuda.stream(torch.cuda.current_stream(device)),
        torch.cuda.graph(graph, pool=pool, stream=capture_stream(device), capture_error_mode="thread_local"),
    ):
        made = call()
    return graph, made


CAPTURES: dict[str, Callable[..., Any]] = {"cuda": cuda_graph}
"""The types of devices whose kernels can be captured, which saves the time of the host to launch them one by one."""


@dataclass(eq=False)
class _Rows:
    """The rows in the cache. ``numbers``: their indices in the batch. ``starts``: the position of each row's first token.
    ``static``: the cache has room for further tokens.

    ``active``: True for rows that have not ended. ``mask``: True for the tokens of prompts and completions, False for padding.
    ``states``: the hidden states before the next token, valid once the last ``unread`` tokens have been run through the model.
    ``supports``: (rows, position, ids that top-k and top-p kept). ``kept``: the same, with masks over the vocabulary in place of
    ids, until the host synchronises with the device. ``graph``: the ids and positions that the
    captured forward pass of a token reads, and the states that it writes.
    """

    numbers: Tensor
    prompts: Prompts
    starts: Tensor
    mask: Tensor
    active: Tensor
    states: Tensor
    cache: object
    static: bool
    unread: int = 0
    supports: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    kept: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)
    graph: tuple[Tensor, Tensor, Tensor] | None = None

    def list_kept(self) -> None:
        """Turn the masks in ``kept`` into ids in ``supports``. The host waits for the device to learn the number of ids."""
        if self.kept:
            ids = mask_to_ids(torch.cat([mask for _, _, mask in self.kept]))
            parts = ids.split([len(mask) for _, _, mask in self.kept])
            self.supports += [(numbers, place, part) for (numbers, place, _), part in zip(self.kept, parts, strict=True)]
            self.kept.clear()


class CachedDecoding:
    """Samples token by token with the model's own cache (implements ``Engine``). Each prompt is read once for all its rows.

    Rows that have ended are removed from the cache when they are at least half of its rows. If the grammar forces the next token of
    all rows, and the host checks after every token, this token is run through the model together with the next sampled token.

    ``exact``: None means True for weights in fp32 and False in 16 bits, where a forward pass over the whole row and decoding token
    by token differ by far more than a ratio may; pass False if they also differ in fp32 (a deep model). ``check_every``: number of
    tokens after which the host asks the device whether rows have ended; each check waits for all queued kernels, and rows that
    ended in between get padding. None means 1 on the CPU and ``CHECK_EVERY`` elsewhere. ``static``: the cache has room for ``ROOM``
    tokens, and each forward pass reads one token per row. Until the room is used up, all passes have the same shapes and do not
    wait for the device. On a CUDA device the pass is captured as a CUDA graph, once per room of each call, so that a graph never
    reads weights or a cache that have moved. None means True where graphs can be captured and the
    model has a static cache. ``any_rank``: tells whether a flag is true on at least one of the ranks that must call the model
    equally often; all of them decode until the last one is done. Their collectives are not captured.

    Raises ValueError for a model without a static cache.
    """

    def __init__(
        self,
        model: AutoregressiveModel,
        *,
        exact: bool | None = None,
        check_every: int | None = None,
        static: bool | None = None,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        if static and not isinstance(model, HasStaticCache):
            raise ValueError(f"rollout.engine.static: {type(model).__name__} has no method static_cache; remove the key")
        self.model = model
        self.check_every = check_every
        self.static = static
        self.any_rank = any_rank
        self.captures = any_rank is bool
        self._exact = exact
        self._graph: Any = None

    def is_static(self, device: torch.device) -> bool:
        """Whether the cache on this device has room for further tokens."""
        if self.static is None:
            return self.captures and device.type in CAPTURES and isinstance(self.model, HasStaticCache)
        return self.static

    @property
    def exact(self) -> bool:
        return compute_dtype(self.model.module) == torch.float32 if self._exact is None else self._exact

    @torch.no_grad()
    def __call__(self, batch: Batch, prompts: Prompts, sampling: TokenSampling, *, greedy: bool = False) -> Generation:
        """Generate a completion for each row. ``greedy``: the most likely token at each position; log-probabilities are NaN."""
        longest, device = sampling.max_new_tokens, prompts.ids.device
        uniform = None if greedy else uniforms(batch, longest)
        if uniform is not None and device.type != "mps":  # MPS has no fp64
            uniform = uniform.to(device)
        rows, stop = self._prefill(batch, prompts, room=min(longest, ROOM)), torch.tensor(self.model.stop, device=device)
        every = self.check_every or (1 if device.type == "cpu" and not rows.static else CHECK_EVERY)
        ids = torch.full((len(batch), longest), self.model.pad, device=device)
        lengths = torch.zeros(len(batch), dtype=torch.long, device=device)
        log_probs = torch.zeros(ids.shape, device=device)
        for place in range(longest):
            numbers = rows.numbers
            chosen, chosen_log_probs = self._choose(rows, ids[numbers, :place], uniform, sampling, asks=every == 1)
            ids[numbers, place] = torch.where(rows.active, chosen, self.model.pad)
            log_probs[numbers, place] = torch.where(rows.active, chosen_log_probs, 0.0)
            lengths[numbers] += rows.active
            if rows.static:
                rows.mask[:, prompts.mask.shape[1] + place] = rows.active
            else:
                rows.mask = torch.cat([rows.mask, rows.active[:, None]], dim=1)
            rows.unread += 1
            rows.active = rows.active & ~torch.isin(chosen, stop)
            is_full = rows.static and (place + 1) % ROOM == 0
            if (place + 1) % every and not is_full:
                continue
            left = int(rows.active.sum())
            rows.list_kept()
            if not self.any_rank(left > 0) or place + 1 == longest:
                break
            drops = 0 < 2 * left <= len(numbers)
            if is_full or (drops and not rows.static):
                stay = rows.active.nonzero()[:, 0] if drops else torch.arange(len(numbers), device=device)
                if is_full:
                    assert isinstance(self.model, HasStaticCache)
                    room = min(ROOM, longest - place - 1)
                    rows.cache, rows.graph = self.model.static_cache(rows.cache, stay, room=room), None
                    rows.mask = nn.functional.pad(rows.mask, (0, room))
                else:
                    rows.cache = self.model.select(rows.cache, stay)
                rows.prompts, rows.numbers, rows.mask = rows.prompts.take(stay), rows.numbers[stay], rows.mask[stay]
                rows.states, rows.starts, rows.active = rows.states[stay], rows.starts[stay], rows.active[stay]
        rows.list_kept()
        support = None
        if rows.supports:  # the ids that top-k and top-p kept at each position, padded with -1; only -1 after the end of a row
            width = max(kept.shape[1] for _, _, kept in rows.supports)
            support = torch.full((len(lengths), longest, width), -1, dtype=torch.int32, device=device)
            for numbers, place, kept in rows.supports:
                support[numbers, place, : kept.shape[1]] = kept
            support[torch.arange(longest, device=device) >= lengths[:, None]] = -1
        return Generation(ids=ids, lengths=lengths, log_probs=log_probs, support=support)

    def _prefill(self, batch: Batch, prompts: Prompts, *, room: int) -> _Rows:
        group = torch.tensor(batch.group, device=prompts.ids.device)
        states, cache = self.model.prefill(self.model.module, prompts)
        mask, static = prompts.mask[group], self.is_static(group.device)
        if static:
            assert isinstance(self.model, HasStaticCache)
            try:
                cache, mask = self.model.static_cache(cache, group, room=room), nn.functional.pad(mask, (0, room))
            except ValueError:
                if self.static:
                    raise
                static = False  # a sliding window
        if not static:
            cache = self.model.select(cache, group)
        return _Rows(
            numbers=torch.arange(len(group), device=group.device),
            prompts=prompts.take(group),
            starts=prompts.next_positions()[group],
            mask=mask,
            active=torch.ones_like(group, dtype=torch.bool),
            states=states[group],
            cache=cache,
            static=static,
        )

    def _extend(self, rows: _Rows, ids: Tensor, positions: Tensor, *, is_first: bool) -> Tensor:
        """The states of the next tokens, (rows, tokens, d). The first token of a completion runs without a graph, so that libraries
        have allocated what they keep before the capture."""

        def call() -> Tensor:
            return self.model.extend(self.model.module, ids, mask=rows.mask, positions=positions, cache=rows.cache)

        capture = CAPTURES.get(ids.device.type) if rows.static and self.captures else None
        if capture is None or is_first:
            return call()
        if rows.graph is None:
            try:
                self._graph, states = capture(call, self._graph, ids.device)
            except RuntimeError as error:
                self.captures = False
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warnings.warn(f"a decoding step of this model cannot be captured, so decoding is slower: {reason}", stacklevel=2)
                return call()
            rows.graph = ids, positions, states
        for own, new in zip(rows.graph, (ids, positions), strict=False):
            own.copy_(new)
        self._graph.replay()
        return rows.graph[2]

    def _choose(
        self, rows: _Rows, ids: Tensor, uniform: Tensor | None, sampling: TokenSampling, *, asks: bool
    ) -> tuple[Tensor, Tensor]:
        """The next id of each row, and its log-probability: 0 if the grammar forces the id, NaN if ``uniform`` is None (greedy).

        ``asks``: whether the host may wait for the device.
        """
        grammar, place = self.model.grammar, ids.shape[1]
        vocabulary, forced = (column[:, -1] for column in grammar.parse(rows.prompts, ids))
        if asks and not rows.static and getattr(grammar, "forces", True) and bool((forced >= 0).all()):
            return forced, torch.zeros(forced.shape, device=forced.device)
        if rows.unread:
            places = torch.arange(place - rows.unread, place, device=ids.device)
            states = self._extend(rows, ids[:, places], rows.starts[:, None] + places, is_first=place == 1)
            rows.states, rows.unread = states[:, -1], 0
        temperature = 1.0 if uniform is None else sampling.temperature
        allowed = allowed_ids(grammar, vocabulary)
        logits = warp_logits(self.model.logits(self.model.module, rows.states), allowed, temperature=temperature)
        if uniform is None:
            return torch.where(forced >= 0, forced, logits.argmax(-1)), torch.full(forced.shape, torch.nan, device=forced.device)
        support = None
        if sampling.truncates:
            kept = top_k_top_p_mask(logits, top_k=sampling.top_k, top_p=sampling.top_p)
            rows.kept.append((rows.numbers, place, kept))
            if asks:
                rows.list_kept()
                support = rows.supports[-1][2]
            logits = logits.masked_fill(~kept, -torch.inf)
        sampled = sample_tokens(logits, uniform[rows.numbers.to(uniform.device), place])
        log_probs = log_prob(logits, sampled, support=support)
        return torch.where(forced >= 0, forced, sampled), torch.where(forced >= 0, 0.0, log_probs)


def uniforms(batch: Batch, count: int) -> Float[Tensor, "b count"]:
    """``count`` uniform random numbers in [0, 1) for each row, fp64, on the CPU, keyed by (seed, step, group, slot)."""
    keys = [(batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
    draws = [generator(batch.seed, "token", batch.step, group, slot) for group, slot in keys]
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=each) for each in draws])
