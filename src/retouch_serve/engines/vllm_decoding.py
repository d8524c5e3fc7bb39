"""Decoding by a vLLM server, into which the policy's weights are loaded after each update.

The server's kernels, batches and number types differ from the policy's, so its log-probabilities are not exact: the policy
evaluates the completions itself and keeps the server's log-probabilities as ``behaviour_log_probs``. Rows are sampled with seeds
keyed by (seed, step, group, slot), but vLLM gives the same samples for a seed only in the same batch, so a resumed run does not
have the same bits.
"""

import re
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.policies.engine import EngineFault, Generation, TokenSampling
from retouch.protocols import Grammar
from retouch.types import Batch, Prompts, Task
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.grammar import ImageGrammar, grammar_to_json
from retouch_serve.engines.publishing import WeightPublisher
from retouch_serve.engines.rows import TaskRows, concurrently, consecutive_rows, group_seed
from retouch_serve.engines.server import query_sampling
from retouch_serve.engines.sleep_mode import SleepMode
from retouch_serve.engines.wire import (
    GENERATE,
    MAX_BIASED,
    PLUGIN,
    GenerateRequest,
    InvalidResponse,
    ServedWeights,
    ServerCompletion,
    WeightsLost,
    data_url,
    parse_response,
)

_MAX_CONCURRENT = 64
_TOO_MANY_ROWS = re.compile(r"max_num_seqs \((\d+)\)")


@runtime_checkable
class Servable(Protocol):
    """What a model must have so that a server can generate in its place."""

    grammar: Grammar
    stop: tuple[int, ...]
    pad: int
    image_token: int | None

    def resized_images(self, task: Task) -> Sequence[Image]:
        """The task's images at their final size; empty if the images are in the prompt's ids.

        The server's image processor must not resize them, because it uses torchvision, whose pixels differ from PIL's.
        """
        ...


class VllmDecoding:
    """Requests the completions of a batch from a server: one request per task for all its rows (implements ``Engine``).

    ``connect``: opens a new connection. ``weights``: loads the policy's weights into the server. ``any_rank``: tells whether a flag
    is true on at least one rank. ``release``: called by ``close``. ``sleep_mode``: puts the server to sleep between the calls. A
    grammar of images (``ImageGrammar``) is applied by the plug-in in the server. Raises ValueError if the model's grammar is
    neither an ``ImageGrammar`` nor a single vocabulary, or if it excludes more tokens than a request may ban.
    """

    exact = False

    def __init__(
        self,
        model: Servable,
        *,
        connect: Callable[[], Client],
        weights: WeightPublisher[ServedWeights],
        any_rank: Callable[[bool], bool] = bool,
        release: Callable[[], None] | None = None,
        sleep_mode: SleepMode | None = None,
    ) -> None:
        grammar = model.grammar
        vocabularies = grammar.vocabularies
        self._vocabulary = vocabularies.shape[1]
        self._grammar = grammar_to_json(grammar) if isinstance(grammar, ImageGrammar) else None
        banned = () if self._grammar is not None else (~vocabularies[0]).nonzero()[:, 0].tolist()
        self._banned = frozenset(banned)
        if self._grammar is None and ((vocabularies != vocabularies[0]).any() or len(banned) > MAX_BIASED):
            raise ValueError(
                f"a request to vLLM has one set of tokens, and can ban at most {MAX_BIASED} tokens; this model has "
                f"{len(vocabularies)} sets, and bans {len(banned)} tokens. Use rollout.engine.kind cached"
            )
        self.model = model
        self._connect = connect
        self._weights = weights
        self._any_rank = any_rank
        self._release = release
        self._sleep_mode = sleep_mode
        self._is_checked = False

    def __call__(self, batch: Batch, prompts: Prompts, sampling: TokenSampling) -> Generation:
        """Generate the completions. Raises EngineFault on all ranks if the server fails, or returns an invalid response."""
        if self._grammar is not None and sampling.truncates:
            raise ValueError("vLLM does not report what top_k and top_p kept if the grammar plug-in is used; remove both")
        fault = generation = None
        try:
            with self._connect() as client:
                if self._sleep_mode is not None:
                    self._sleep_mode.wake(client)
                weights = self._weights.publish(client)
                if not self._is_checked:
                    self._check_server(client, sampling)
                completions = self._completions(client, weights, batch, prompts, sampling)
            generation = self._generation(prompts, sampling, completions)
            self._check(batch, prompts, generation)
        except EngineFault as found:
            fault = found
        if self._any_rank(fault is not None):
            raise fault or EngineFault("the vLLM server failed on another rank; see the log of that rank")
        if self._sleep_mode is not None:
            with self._connect() as client:
                self._sleep_mode.sleep(client)
        assert generation is not None
        return generation

    def close(self) -> None:
        """Remove the run's weights from the server. The next call loads them again."""
        if self._release is not None:
            self._release()

    def _check_server(self, client: Client, sampling: TokenSampling) -> None:
        """Raise EngineFault unless the server returns the log-probabilities that it samples from, and what top-k and top-p kept."""
        found = query_sampling(client)
        if not found.processed:
            raise EngineFault(
                f"{client.server} returns raw log-probabilities, not those that it samples from; start it with "
                "--logprobs-mode processed_logprobs"
            )
        if sampling.truncates and not found.returns_mask:
            raise EngineFault(
                f"{client.server} does not report what top_k and top_p kept; start the server with --return-sampling-mask"
            )
        if found.returns_mask and sampling.top_k is None:
            raise EngineFault(
                f"{client.server} was started with --return-sampling-mask, so that it answers only requests with "
                "top_k; start it without the flag, or set rollout.top_k"
            )
        self._is_checked = True

    def _completions(
        self, client: Client, weights: ServedWeights, batch: Batch, prompts: Prompts, sampling: TokenSampling
    ) -> list[ServerCompletion]:
        """One completion for each row of the batch."""

        def generate(rows: TaskRows) -> list[ServerCompletion]:
            ids, mask = prompts.ids[rows.task], prompts.mask[rows.task]
            request = GenerateRequest(
                weights=weights,
                ids=tuple(ids[mask].tolist()),
                image_token=self.model.image_token,
                images=tuple(data_url(image) for image in self.model.resized_images(batch.tasks[rows.task])),
                sampling=sampling,
                stop=self.model.stop,
                banned=self._banned,
                seed=group_seed(batch, batch.group_ids[rows.task], "vllm") + rows.slot,
                count=rows.count,
                grammar=self._grammar,
            )
            return self._generate(client, request)

        return concurrently(generate, consecutive_rows(batch), most=_MAX_CONCURRENT)

    def _generate(self, client: Client, request: GenerateRequest) -> list[ServerCompletion]:
        try:
            return self._ask(client, request)
        except RequestRefused as refused:
            raise EngineFault(f"{client.server} refuses to generate: {refused}") from None
        except InvalidResponse as invalid:
            raise EngineFault(f"{client.server} gave an invalid response: {invalid}") from None
        except WeightsLost:
            raise EngineFault(f"{client.server} lost the weights again as soon as they were loaded") from None

    def _ask(self, client: Client, request: GenerateRequest) -> list[ServerCompletion]:
        """The completions. Splits a request with too many rows for the server; reloads the weights if the server lost them."""
        try:
            try:
                return self._ask_once(client, request)
            except WeightsLost:
                self._weights.restore(client)
                return self._ask_once(client, request)
        except RequestRefused as refused:
            limit = _TOO_MANY_ROWS.search(refused.text)
            if limit is None or not 0 < int(limit[1]) < request.count:
                raise
            return [completion for part in request.split(int(limit[1])) for completion in self._ask(client, part)]

    def _ask_once(self, client: Client, request: GenerateRequest) -> list[ServerCompletion]:
        try:
            body = client.post(GENERATE, request.body())
        except RequestRefused as refused:
            if refused.status == 404 and request.weights.model is not None and request.weights.model in refused.text:
                raise WeightsLost from None
            raise
        return parse_response(body, request, vocabulary=self._vocabulary)

    def _check(self, batch: Batch, prompts: Prompts, generation: Generation) -> None:
        """Raise EngineFault if a token violates the model's grammar."""
        grammar, ids = self.model.grammar, generation.ids
        rows = prompts.take(torch.tensor(batch.group, device=ids.device))
        vocabulary, forced = (column[:, :-1] for column in grammar.parse(rows, ids))
        allowed = torch.where(forced >= 0, ids == forced, grammar.vocabularies[vocabulary, ids])
        real = torch.arange(ids.shape[1], device=ids.device) < generation.lengths[:, None]
        if bool((real & ~allowed).any()):
            raise EngineFault(
                "the vLLM server generated tokens that this model's grammar forbids; for image tokens, start it with "
                f"--logits-processors {PLUGIN}"
            )

    def _generation(self, prompts: Prompts, sampling: TokenSampling, completions: Sequence[ServerCompletion]) -> Generation:
        device, longest = prompts.ids.device, sampling.max_new_tokens
        ids = _pad([completion.ids for completion in completions], longest, self.model.pad)
        support = None
        if sampling.truncates:
            width = max(len(kept) for completion in completions for kept in completion.kept or ())
            rows = [_pad(completion.kept or (), width, -1) for completion in completions]
            support = torch.stack([torch.cat([row, row.new_full((longest - len(row), width), -1)]) for row in rows])
        return Generation(
            ids=ids.to(device),
            lengths=torch.tensor([len(completion.ids) for completion in completions]).to(device),
            log_probs=_pad([completion.log_probs for completion in completions], longest, 0.0).to(device),
            support=None if support is None else support.int().to(device),
        )


def _pad(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    """Pad rows of unequal lengths on the right; the tensor has integers if ``filler`` is an integer."""
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
