"""Counts work that repeats earlier work without running it again: denoising steps, chunks, microbatches, tokens."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from retouch.policies.autoregressive import TokenizesTargets, TokenizesText
from retouch.policies.decoding import CAPTURES, CHECK_EVERY, ROOM, CachedDecoding
from retouch.policies.engine import Generation, TokenSampling
from retouch.protocols import AutoregressiveModel
from retouch.types import Batch, Codes, Conditioning, Prompts, Task
from retouch_models.causal import PreallocatedCacheLayer
from retouch_plan.accelerator import FakeTensor
from retouch_plan.meter import Meter, Rise, Work

PARTS = 2
"""Number of microbatches that are run: the second one runs while the gradients of the first exist."""


@dataclass
class Repeats:
    """Counts calls that repeat earlier ones without running them."""

    meter: Meter
    met: set[str] = field(default_factory=set)

    def calls(
        self,
        call: Callable[..., Any],
        key: Callable[..., Any],
        again: Callable[[Any], Any] = lambda made: made,
        *,
        in_all_stages: bool = False,
    ) -> Callable[..., Any]:
        """Wrap ``call``: it runs once per stage for each ``key`` of its arguments; repeated calls return ``again(result)``.
        ``in_all_stages``: run it once for all stages together."""
        seen: dict[Any, tuple[Work, Rise, Callable[[], Any]]] = {}

        def once(*args: Any, **kwargs: Any) -> Any:
            place = None if in_all_stages else self.meter.stage_name, key(*args, **kwargs)
            if place in seen:
                work, rise, result = seen[place]
                self.meter.repeat(work, rise)
                with self.meter.paused():
                    return again(result())
            before = self.meter.work.copy()
            with self.meter.rise() as rise:
                made = call(*args, **kwargs)
            seen[place] = self.meter.work.since(before), rise, _remembered(made)
            return made

        return once

    def layers(self, module: nn.Module) -> None:
        """Run equal layers of a frozen module only for inputs with new shapes."""
        for stack in module.modules():
            if isinstance(stack, nn.ModuleList) and len({type(each) for each in stack}) == 1:
                run = self.calls(
                    lambda forward, *args, **kwargs: forward(*args, **kwargs),
                    lambda forward, *args, **kwargs: (_shape(args), _shape(kwargs), torch.is_grad_enabled()),
                    in_all_stages=True,
                )
                for layer in stack:
                    layer.forward = partial(run, layer.forward)

    def parts(self, call: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Wrap ``call`` to yield only the first ``PARTS`` parts, and one part of each other size.

        A part that is left out is counted with the work of the last part of its size. The first part of a stage counts only for
        itself, because it runs before there are gradients.
        """

        def few(*args: Any, **kwargs: Any) -> Iterator[Any]:
            count = PARTS if self.meter.stage_name not in self.met else 1
            self.met.add(self.meter.stage_name)
            works: dict[Any, Work] = {}
            for place, part in enumerate(call(*args, **kwargs)):
                size = _size(part)
                if place >= count and size in works:
                    self.meter.work.add(works[size])
                    continue
                before = self.meter.work.copy()
                yield part
                if place > 0 or count == 1:
                    works[size] = self.meter.work.since(before)

        return few


def _size(part: Any) -> Any:
    """Return the number of rows of a part of a trajectory and, if it has some of their actions, of its actions."""
    return part.stop - part.start if isinstance(part, slice) else (_size(part.rows), _size(part.actions))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, list | tuple):
        return tuple(_shape(each) for each in value)
    if isinstance(value, Mapping):
        return tuple((name, _shape(each)) for name, each in value.items())
    return value if isinstance(value, int | float | str | None) else type(value)


def _remembered(made: Any) -> Callable[[], Any]:
    """Return a function that makes the result again. It keeps only shapes and known values of tensors, so it needs no memory."""
    if isinstance(made, Tensor):
        shape, dtype, device = made.shape, made.dtype, made.device
        values = made.known_values if isinstance(made, FakeTensor) else made
        return lambda: torch.empty(shape, dtype=dtype, device=device) if values is None else values.to(device, copy=True)
    if isinstance(made, Conditioning | Prompts):
        parts = {each.name: _remembered(getattr(made, each.name)) for each in fields(made)}
        return lambda: type(made)(**{name: part() for name, part in parts.items()})
    if isinstance(made, Mapping):
        entries = {name: _remembered(value) for name, value in made.items()}
        return lambda: {name: value() for name, value in entries.items()}
    if isinstance(made, tuple):
        members = [_remembered(each) for each in made]
        return lambda: tuple(each() for each in members)
    return lambda: made


class FewTokens:
    """Runs the decoding of only a few tokens (implements ``Engine``): the first ones, and the last ones with a full cache.

    The other tokens are counted with the mean work of both. With a static cache, the cache is full from the start in a second call.
    Every completion has the maximum length and is not truncated.
    """

    def __init__(self, decoder: CachedDecoding, meter: Meter) -> None:
        self.decoder = decoder
        self.meter = meter
        self.token: Work | None = None
        """The mean work of a token of a completion."""

    @property
    def exact(self) -> bool:
        return self.decoder.exact

    def __call__(self, batch: Batch, prompts: Prompts, sampling: TokenSampling, *, greedy: bool = False) -> Generation:
        longest, device = sampling.max_new_tokens, prompts.ids.device
        completion = longest_completion(self.decoder.model, longest)
        with patch.dict(CAPTURES, {device.type: None}):  # the kernels are counted one by one, and nothing is captured
            static = self.decoder.is_static(device)
        decode = self._decode_static if static else self._decode_growing
        with patch.object(self.decoder, "static", static):
            generation = decode(batch, prompts, sampling, greedy=greedy, count=len(completion))
        with self.meter.paused():
            ids = torch.full((len(batch), longest), self.decoder.model.pad)
            ids[:, : len(completion)] = torch.tensor(completion)
            lengths = torch.full((len(batch),), len(completion))
            kept = generation.support
            return Generation(
                ids=ids.to(device),
                lengths=lengths.to(device),
                log_probs=torch.zeros(ids.shape, device=device),
                support=None if kept is None else kept[:, :1].expand(-1, longest, -1).contiguous(),
            )

    def _decode_growing(self, batch: Batch, prompts: Prompts, sampling: TokenSampling, *, greedy: bool, count: int) -> Generation:
        """Decode the first tokens, then lengthen the cache, and decode the last ones."""
        run = min(count, 2 * CHECK_EVERY)
        marks: list[tuple[int, Work]] = []
        model = self.decoder.model
        own, start, more = model.extend, prompts.mask.shape[1], 0

        def extend(module: Any, ids: Tensor, *, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
            nonlocal more
            place = mask.shape[1] - start
            if not marks or (len(marks) == 1 and place > run // 2):
                marks.append((place, self.meter.work.copy()))
                if len(marks) == 2:
                    more = count - run
                    with self.meter.paused():
                        for layer in cache.layers:
                            if isinstance(layer, PreallocatedCacheLayer):
                                layer._buffers = None
                                layer.keys, layer.values = (
                                    each.new_empty(*each.shape[:-2], each.shape[-2] + more, each.shape[-1])
                                    for each in (layer.keys, layer.values)
                                )
            whole = torch.cat([mask.new_ones(len(mask), more), mask], dim=1) if more else mask
            return own(module, ids, mask=whole, positions=positions, cache=cache)

        with patch.object(model, "extend", extend):
            short = sampling.model_copy(update={"max_new_tokens": run})
            generation = self.decoder(batch, prompts, short, greedy=greedy)
        if len(marks) == 2:
            (first, begin), (second, middle) = marks
            self.token = Work()
            self.token.add(middle.since(begin), 0.5 / (second - first))
            self.token.add(self.meter.work.since(middle), 0.5 / max(run - second, 1))
            self.meter.work.add(self.token, count - run)
        return generation

    def _decode_static(self, batch: Batch, prompts: Prompts, sampling: TokenSampling, *, greedy: bool, count: int) -> Generation:
        """Decode with the first room of the cache, and with room for all tokens, until the work between two checks by the host is
        known; it is the same for all tokens of a room. A run decodes until the first check at which all rows have ended."""
        every = self.decoder.check_every or CHECK_EVERY
        longest, mean_token = sampling.max_new_tokens, Work()
        first = min(longest, ROOM)
        mean = sum(min(longest, math.ceil(place / ROOM) * ROOM) for place in range(1, count + 1)) / count
        share = (mean - first) / max(longest - first, 1)  # of the work with all room, in a token's mean work
        for room, weight in ((first, 1 - share), (longest, share)) if longest > first else ((longest, 1.0),):
            start = self.meter.work.copy()
            generation, read, token = self._decode_room(batch, prompts, sampling, greedy=greedy, room=room, every=every)
            if token is None:  # the whole completion has been decoded
                return generation
            mean_token.add(token, weight)
            if room != longest:
                self.meter.work.add(self.meter.work.since(start), -1.0)
        if self.decoder.captures:
            kernels = mean_token.counts["kernels"]
            graph = Work(counts=Counter(captured=kernels))
            graph.add_seconds("gaps in CUDA graphs", kernels * self.meter.machine.gap)
            mean_token.add(graph)
            self.meter.work.add(graph, read - 1)  # those that were run here, except the first
        self.meter.work.add(mean_token, min(math.ceil(count / every) * every, longest) - read - 1)
        self.token = mean_token
        return generation

    def _decode_room(
        self, batch: Batch, prompts: Prompts, sampling: TokenSampling, *, greedy: bool, room: int, every: int
    ) -> tuple[Generation, int, Work | None]:
        """Decode some tokens with this room. Returns also the number of tokens that were read, and the work of one."""
        model, asks = self.decoder.model, self.decoder.any_rank
        period = math.ceil(CHECK_EVERY / every) * every
        marks: list[Work] = []
        own, read = model.extend, 0

        def extend(module: Any, ids: Tensor, *, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
            nonlocal read
            read += 1
            if read in (1, 1 + period):
                marks.append(self.meter.work.copy())
            return own(module, ids, mask=mask, positions=positions, cache=cache)

        with (
            patch.object(model, "extend", extend),
            patch.object(self.decoder, "any_rank", lambda flag: asks(flag) and len(marks) < 2),
            patch("retouch.policies.decoding.ROOM", room),
        ):
            generation = self.decoder(batch, prompts, sampling, greedy=greedy)
        token = None
        if len(marks) == 2:
            token = Work()
            token.add(marks[1].since(marks[0]), 1 / period)
        return generation, read, token


def longest_completion(model: AutoregressiveModel, longest: int) -> list[int]:
    """Return the ids of a made-up completion of at most ``longest`` tokens, including its end token."""
    if not isinstance(model, TokenizesTargets):
        word = model.text_ids("word")[0] if isinstance(model, TokenizesText) else 1
        return [word] * (longest - 1) + [model.stop[0]]
    height, width = model.grid  # type: ignore[attr-defined]
    words = getattr(model, "words", None)
    if words is None:  # image codes have their own ids
        return [0] * (height * width) + [model.stop[0]]
    task = Task("dry run", "", meta={Codes.TARGET: [[0] * width] * height, Codes.THOUGHT: ""})
    image = [*model.target_ids([task])[0], model.stop[0]]
    thought = words.text_ids(" word" * (longest - len(image))) if getattr(model, "thinks", False) else []
    return [*thought[: longest - len(image)], *image]
