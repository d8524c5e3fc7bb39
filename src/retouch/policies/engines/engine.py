"""Completions from a vLLM server (an ``Engine``): it holds the base weights, and each update's adapter is loaded into it.

Its kernels, batches and number types are its own, so its probabilities are not ours to rounding: the policy measures what was
written and keeps the server's as ``behaviour_log_probs``. Rows are drawn with seeds keyed by (seed, step, group, slot), but a seed
gives the same ids again only in the same batch, so a run that goes on does so without the same bits.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.policies.autoregressive.decoding import Decoding, Generation
from retouch.policies.autoregressive.mismatch import EngineFault
from retouch.policies.engines.adapters import Adapters
from retouch.policies.engines.client import Client, Refused
from retouch.policies.engines.form import PLUGIN, Formed, told
from retouch.policies.engines.wire import GENERATE, MOST_BIASED, Answer, BadAnswer, Question, data_url, read
from retouch.protocols import Grammar
from retouch.types import Batch, Prompts, Task

_AT_ONCE = 64


@runtime_checkable
class Served(Protocol):
    """What the engine asks of a writer that a server can stand in for."""

    grammar: Grammar
    stop: tuple[int, ...]
    pad: int
    image_token: int | None

    def seen(self, task: Task) -> Sequence[Image]:
        """A task's pictures at the size at which the image processor gets them."""
        ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """The next ``count`` rows: task number ``task``, slots from ``slot`` on."""

    task: int
    slot: int
    count: int


class VllmEngine:
    """Asks a server for the completions of a batch: a request for each task, its rows drawn in one.

    ``connect``: a new connection to the server. ``any_rank``: whether something is so on one rank at least. A grammar of image
    tokens (``form.Formed``) is kept to by the plug-in that the server loads. ValueError where the writer's grammar is neither that
    nor one set of tokens, or leaves out more of them than a request may ban.
    """

    exact = False

    def __init__(
        self,
        model: Served,
        *,
        connect: Callable[[], Client],
        adapters: Adapters,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        grammar = model.grammar
        vocabularies = grammar.vocabularies
        self._vocabulary = vocabularies.shape[1]
        self._form = told(grammar) if isinstance(grammar, Formed) else None
        banned = () if self._form is not None else (~vocabularies[0]).nonzero()[:, 0].tolist()
        self._banned = frozenset(banned)
        if self._form is None and ((vocabularies != vocabularies[0]).any() or len(banned) > MOST_BIASED):
            raise ValueError(
                f"vLLM is told one set of tokens and may be told {MOST_BIASED} that are not in it; this writer has "
                f"{len(vocabularies)} sets, and leaves out {len(banned)} tokens. Take rollout.engine.kind cached"
            )
        self.model = model
        self._connect = connect
        self._adapters = adapters
        self._any_rank = any_rank

    def __call__(self, batch: Batch, prompts: Prompts, decoding: Decoding) -> Generation:
        """EngineFault, on all ranks, where the server fails on one of them, or gives an answer that cannot be believed."""
        if self._form is not None and decoding.truncates:
            raise ValueError("vLLM does not tell what top_k and top_p kept where a plug-in has a say; leave both out")
        fault = completion = None
        try:
            with self._connect() as client:
                adapter = self._adapters.current(client)
                completion = self._completion(prompts, decoding, self._answers(client, adapter, batch, prompts, decoding))
            self._check(batch, prompts, completion)
        except EngineFault as found:
            fault = found
        if self._any_rank(fault is not None):
            raise fault or EngineFault("the vLLM server failed another rank; that rank's log says how")
        assert completion is not None
        return completion

    def _answers(self, client: Client, adapter: str, batch: Batch, prompts: Prompts, decoding: Decoding) -> list[Answer]:
        """Row by row."""

        def ask(asked: _Asked) -> list[Answer]:
            ids, mask = prompts.ids[asked.task], prompts.mask[asked.task]
            question = Question(
                adapter=adapter,
                ids=tuple(ids[mask].tolist()),
                image_token=self.model.image_token,
                pictures=tuple(data_url(image) for image in self.model.seen(batch.tasks[asked.task])),
                decoding=decoding,
                stop=self.model.stop,
                banned=self._banned,
                seed=_seed(batch, batch.group_ids[asked.task]) + asked.slot,
                count=asked.count,
                form=self._form,
            )
            return self._one(client, question)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            waiting = [pool.submit(ask, asked) for asked in _requests(batch)]
            try:
                return [answer for future in waiting for answer in future.result()]
            finally:
                pool.shutdown(cancel_futures=True)

    def _one(self, client: Client, question: Question) -> list[Answer]:
        try:
            try:
                body = client.post(GENERATE, question.body())
            except Refused as refused:
                if refused.status != 404 or question.adapter not in refused.text:
                    raise
                # Started anew since it was loaded.
                self._adapters.load(client, question.adapter)
                body = client.post(GENERATE, question.body())
            return read(body, question, vocabulary=self._vocabulary)
        except Refused as refused:
            raise EngineFault(f"the vLLM server at {client.url} refuses to write: {refused}") from None
        except BadAnswer as bad:
            raise EngineFault(f"the vLLM server at {client.url} cannot be believed: {bad}") from None

    def _check(self, batch: Batch, prompts: Prompts, completion: Generation) -> None:
        """EngineFault where a token stands that the writer's grammar forbids."""
        grammar, ids = self.model.grammar, completion.ids
        rows = prompts.take(torch.tensor(batch.group, device=ids.device))
        vocabulary, forced = (column[:, :-1] for column in grammar.parse(rows, ids))
        lawful = torch.where(forced >= 0, ids == forced, grammar.vocabularies[vocabulary, ids])
        written = torch.arange(ids.shape[1], device=ids.device) < completion.lengths[:, None]
        if bool((written & ~lawful).any()):
            raise EngineFault(
                "the vLLM server wrote what this writer's grammar forbids; for image tokens, start it with "
                f"--logits-processors {PLUGIN}"
            )

    def _completion(self, prompts: Prompts, decoding: Decoding, answers: Sequence[Answer]) -> Generation:
        device, longest = prompts.ids.device, decoding.max_new_tokens
        ids = _table([answer.ids for answer in answers], longest, self.model.pad)
        lengths = torch.tensor([len(answer.ids) for answer in answers])
        support = None
        if decoding.truncates:
            width = max(len(among) for answer in answers for among in answer.kept or ())
            rows = [_table(answer.kept or (), width, -1) for answer in answers]
            support = torch.stack([torch.cat([row, row.new_full((longest - len(row), width), -1)]) for row in rows])
        return Generation(
            ids=ids.to(device),
            lengths=lengths.to(device),
            log_probs=_table([answer.log_probs for answer in answers], longest, 0.0).to(device),
            support=None if support is None else support.int().to(device),
        )


def _requests(batch: Batch) -> list[_Asked]:
    """The rows cut where the task changes or its slots do not follow one another."""
    found: list[_Asked] = []
    for task, slot in zip(batch.group, batch.slot, strict=True):
        last = found[-1] if found else None
        if last is not None and task == last.task and slot == last.slot + last.count:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(_Asked(task, slot, count=1))
    return found


def _seed(batch: Batch, group: int) -> int:
    """What slot 0 of a group is drawn with; slot k with k more. 62 bits, since the server takes 63 and no sign."""
    key = hashlib.sha256(repr((batch.seed, "vllm", batch.step, group)).encode()).digest()
    return int.from_bytes(key[:8], "big") >> 2


def _table(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    """Rows of unequal lengths, filled up; of whole numbers where the filler is one."""
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
