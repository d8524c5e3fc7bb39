"""How completions are drawn: the settings, what an engine gives back, and the engine that decodes with the model itself.

Every token of row i is drawn by inversion from a uniform number of its own, keyed by (seed, step, group, slot) and its place and
drawn on the CPU, so that a completion does not depend on the rows beside it. Another engine (continuous batching, a server)
has its own randomness; it is handed to the policy's constructor, and the policy measures what it wrote.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retouch.core.random import generator
from retouch.core.tokens import log_prob, mask_to_ids, sample_tokens, top_k_top_p_mask, warp_logits
from retouch.policies.autoregressive.measuring import allowed_ids
from retouch.protocols import AutoregressiveModel
from retouch.types import Batch, Prompts


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The distribution of each token, and the longest completion.

    ``temperature`` 0 takes the likeliest id (and then has no log-probability). ``top_k``, ``top_p``: see ``top_k_top_p_mask``;
    None or 1.0 keeps all. ValueError for what is no such setting.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens}, temperature {self.temperature}: give at least 1 token, and 0 or more"
            )
        if (self.top_k is not None and self.top_k < 1) or (self.top_p is not None and not 0 < self.top_p <= 1):
            raise ValueError(f"top_k {self.top_k}, top_p {self.top_p}: give top_k of at least 1 and top_p in (0, 1], or None")

    @property
    def truncates(self) -> bool:
        """Whether ids may be left out that are allowed."""
        return self.temperature > 0 and (self.top_k is not None or (self.top_p is not None and self.top_p < 1))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Generation:
    """What an engine wrote, row by row of the batch; t is ``max_new_tokens``, and what stands from the end on is ``pad``.

    ``lengths``: tokens with the one that ended the row. ``log_probs``: by the engine's own account, 0 where it did not draw.
    ``support``: the ids that top-k and top-p kept at each place (see ``core.tokens``), None where they left out nothing.
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    log_probs: Float[Tensor, "b t"]
    support: Int[Tensor, "b t w"] | None = None


@runtime_checkable
class Engine(Protocol):
    """Writes a completion for each row of a batch under the model's weights as they are now.

    ``exact``: its log-probabilities are those that the policy's own evaluation gives, to rounding in fp32. Where they are not,
    the policy measures the completion itself and keeps the engine's as ``behaviour_log_probs``.
    """

    @property
    def exact(self) -> bool: ...

    def __call__(self, batch: Batch, prompts: Prompts, decoding: Decoding) -> Generation: ...


@dataclass(eq=False)
class _Rows:
    """The rows that are still written: their numbers, the first place of each, and what the model keeps of them.

    ``states``: those before the next token, once the last ``unread`` tokens have been read. ``mask``: of all that was written.
    """

    numbers: Tensor
    prompts: Prompts
    starts: Tensor
    mask: Tensor
    writing: Tensor
    states: Tensor
    cache: object
    unread: int = 0
    supports: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)


class CachedDecoding:
    """Decodes token by token with the model's own cache: each task's prompt is read once, and its cache repeated for its rows.

    Rows that have ended are dropped once they are half of those in the cache, and tokens that are forced on all rows are read
    together with the next one that is not. ``exact``: None says yes for weights in fp32 and no in 16 bits, where reading a row at
    once and token by token differ by far more than a ratio may; False where they do in fp32 too (a deep model). ``any_rank``:
    whether something holds on one of the ranks that must call the model equally often; who is done goes on in step with the others.
    """

    def __init__(self, model: AutoregressiveModel, *, exact: bool | None = None, any_rank: Callable[[bool], bool] = bool) -> None:
        self.model = model
        self._exact = exact
        self._any_rank = any_rank

    @property
    def exact(self) -> bool:
        return next(self.model.module.parameters()).dtype == torch.float32 if self._exact is None else self._exact

    @torch.no_grad()
    def __call__(self, batch: Batch, prompts: Prompts, decoding: Decoding) -> Generation:
        longest, device = decoding.max_new_tokens, prompts.ids.device
        uniform = uniforms(batch, longest) if decoding.temperature > 0 else None
        ids = torch.full((len(batch), longest), self.model.pad, device=device)
        lengths = torch.zeros(len(batch), dtype=torch.long, device=device)
        log_probs = torch.zeros(ids.shape, device=device)
        rows, stop = self._read_prompts(batch, prompts), torch.tensor(self.model.stop, device=device)
        for place in range(longest):
            numbers = rows.numbers
            chosen, logged = self._choose(rows, ids[numbers, :place], uniform, decoding)
            ids[numbers, place] = torch.where(rows.writing, chosen, self.model.pad)
            log_probs[numbers, place] = torch.where(rows.writing, logged, 0.0)
            lengths[numbers] += rows.writing
            rows.mask = torch.cat([rows.mask, rows.writing[:, None]], dim=1)
            rows.unread += 1
            rows.writing = rows.writing & ~torch.isin(chosen, stop)
            left = int(rows.writing.sum())
            if not self._any_rank(left > 0):
                break
            if 0 < 2 * left <= len(numbers):
                self._drop_ended(rows)
        return Generation(ids=ids, lengths=lengths, log_probs=log_probs, support=_joined(rows.supports, lengths, longest))

    def _read_prompts(self, batch: Batch, prompts: Prompts) -> _Rows:
        group = torch.tensor(batch.group, device=prompts.ids.device)
        states, cache = self.model.prefill(self.model.module, prompts)
        return _Rows(
            numbers=torch.arange(len(group), device=group.device),
            prompts=prompts.take(group),
            starts=prompts.next_positions()[group],
            mask=prompts.mask[group],
            writing=torch.ones_like(group, dtype=torch.bool),
            states=states[group],
            cache=self.model.select(cache, group),
        )

    def _drop_ended(self, rows: _Rows) -> None:
        stay = rows.writing.nonzero()[:, 0]
        rows.cache, rows.prompts = self.model.select(rows.cache, stay), rows.prompts.take(stay)
        rows.numbers, rows.mask, rows.states = rows.numbers[stay], rows.mask[stay], rows.states[stay]
        rows.starts, rows.writing = rows.starts[stay], rows.writing[stay]

    def _choose(self, rows: _Rows, ids: Tensor, uniform: Tensor | None, decoding: Decoding) -> tuple[Tensor, Tensor]:
        """The next id of each row, and its log-probability: 0 where it is forced, NaN where there is no chance in it."""
        grammar, place = self.model.grammar, ids.shape[1]
        vocabulary, forced = (column[:, -1] for column in grammar.parse(rows.prompts, ids))
        if bool((forced >= 0).all()):
            return forced, torch.zeros(forced.shape, device=forced.device)
        self._read(rows, ids)
        allowed = allowed_ids(grammar, vocabulary)
        logits = warp_logits(self.model.logits(self.model.module, rows.states), allowed, temperature=decoding.temperature or 1.0)
        if uniform is None:
            return torch.where(forced >= 0, forced, logits.argmax(-1)), torch.full(forced.shape, torch.nan, device=forced.device)
        support = None
        if decoding.truncates:
            stays = top_k_top_p_mask(logits, top_k=decoding.top_k, top_p=decoding.top_p)
            support = mask_to_ids(stays)
            rows.supports.append((rows.numbers, place, support))
            logits = logits.masked_fill(~stays, -torch.inf)
        drawn = sample_tokens(logits, uniform[rows.numbers.cpu(), place])
        logged = log_prob(logits, drawn, support=support)
        return torch.where(forced >= 0, forced, drawn), torch.where(forced >= 0, 0.0, logged)

    def _read(self, rows: _Rows, ids: Tensor) -> None:
        """Let the model read the last tokens that it has not read yet."""
        if rows.unread == 0:
            return
        places = torch.arange(ids.shape[1] - rows.unread, ids.shape[1], device=ids.device)
        states = self.model.extend(
            self.model.module, ids[:, places], mask=rows.mask, positions=rows.starts[:, None] + places, cache=rows.cache
        )
        rows.states, rows.unread = states[:, -1], 0


def uniforms(batch: Batch, count: int) -> Float[Tensor, "b count"]:
    """``count`` numbers in [0, 1) for each row, fp64, on the CPU, keyed by (seed, step, group, slot)."""
    keys = [(batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
    draws = [generator(batch.seed, "token", batch.step, group, slot) for group, slot in keys]
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=each) for each in draws])


def wider(support: Int[Tensor, "b t w"], width: int) -> Int[Tensor, "b t width"]:
    """Supports filled up with -1 to ``width`` ids."""
    return torch.cat([support, support.new_full((*support.shape[:2], width - support.shape[2]), -1)], dim=2)


def _joined(supports: Sequence[tuple[Tensor, int, Tensor]], lengths: Tensor, longest: int) -> Tensor | None:
    """One tensor (b, t, w) of what was kept at each place, up to the end of each row."""
    if not supports:
        return None
    width = max(support.shape[1] for _, _, support in supports)
    joined = torch.full((len(lengths), longest, width), -1, dtype=torch.int32, device=lengths.device)
    for numbers, place, support in supports:
        joined[numbers, place, : support.shape[1]] = support
    ended = torch.arange(longest, device=lengths.device) >= lengths[:, None]
    return joined.masked_fill(ended[..., None], -1)
