"""Decoding by a vLLM server, into which the policy's weights are loaded after each update.

The server's kernels, batches and number types differ from the policy's, so its log-probabilities are not exact: the policy
evaluates the completions itself and keeps the server's log-probabilities as ``behaviour_log_probs``. Rows are sampled with seeds
keyed by (seed, step, group, slot), but vLLM gives the same samples for a seed only in the same batch, so a resumed run does not
have the same bits.
"""

import gc
import logging
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.policies.engine import EngineFault, Generation, TokenSampling
from retouch.protocols import Grammar
from retouch.types import Batch, Prompts, Task
from retouch_serve.engines.client import (
    Client,
    InvalidResponse,
    RequestRefused,
    TaskRows,
    WeightPublisher,
    concurrently,
    consecutive_rows,
    group_seed,
    json_object,
    on_all_ranks,
)
from retouch_serve.engines.grammar import ImageGrammar, grammar_to_json
from retouch_serve.engines.vllm_wire import (
    GENERATE,
    LOAD,
    MAX_BIASED,
    PLUGIN,
    RESET,
    RPC,
    SET_VERSION,
    UNLOAD,
    VERSION,
    GenerateRequest,
    ServerCompletion,
    WeightsLost,
    data_url,
    parse_response,
    query_sampling,
)

SLEEP, WAKE, STATE, INFO = "/sleep?level=1&mode=wait", "/wake_up", "/is_sleeping", "/server_info?config_format=json"
_MAX_CONCURRENT = 64
_TOO_MANY_ROWS = re.compile(r"max_num_seqs \((\d+)\)")
NamedBy: TypeAlias = Literal["model", "version"]
log = logging.getLogger("retouch")


class VllmPublisher(WeightPublisher):
    """A publisher to a vLLM server. ``named_by``: the field of ``GenerateRequest`` that names the weights."""

    named_by: ClassVar[NamedBy]


class AdapterPublisher(VllmPublisher):
    """Keeps the server's adapter equal to the policy's. ``save`` writes PEFT's format.

    The name of an adapter contains a digest of its weights. So the server's prefix cache, which is keyed by the name, is never
    stale, and loading the same adapter twice does no harm.
    """

    named_by = "model"

    def load(self, client: Client, name: str) -> None:
        folder = (self._folder / name).absolute()
        try:
            # One try: this endpoint answers HTTP 500 if vLLM cannot load the adapter, for example because of its rank.
            client.post(LOAD, {"lora_name": name, "lora_path": str(folder)}, tries_of_500=1)
        except RequestRefused as refused:
            if refused.status == 400 and "already been loaded" in refused.text:
                return
            raise EngineFault(
                f"{client.server} did not load the adapter {folder}: {refused}. It must be started with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank of at least policy.train.rank, and see "
                "that folder (rollout.engine.adapters)"
            ) from None

    def unload(self, client: Client, name: str) -> None:
        try:
            client.post(UNLOAD, {"lora_name": name})
        except RequestRefused as refused:
            if refused.status != 404:  # 404: removed by a restart; an adapter that stays costs only memory
                log.warning("the vLLM server did not unload the adapter %s: %s", name, refused)


class FullWeightPublisher(VllmPublisher):
    """Keeps all weights of the server equal to the policy's. ``save`` writes a folder of safetensors in transformers' layout.

    vLLM reloads weights in place through its development endpoints (``VLLM_SERVER_DEV_MODE=1``), and keeps the last ones. Each
    response contains the version of the weights that generated each token, so tokens of other weights are detected, also after a
    restart of the server.
    """

    named_by = "version"

    def load(self, client: Client, name: str) -> None:
        folder = (self._folder / name).absolute()
        try:
            if json_object(client.get(VERSION)).get("weight_version") == name:
                return
            # A failed reload leaves the server without usable weights, so set a version that no request expects.
            client.post(SET_VERSION, {"new_version": f"loading-{name}"})
            client.post(RPC, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, tries_of_500=1)
            if json_object(client.post(RESET, {})).get("success") is not True:
                raise EngineFault(f"{client.server} did not clear its prefix cache after new weights were loaded")
            client.post(SET_VERSION, {"new_version": name})
        except RequestRefused as refused:
            raise EngineFault(
                f"{client.server} did not load the weights {folder}: {refused}. It must be started with "
                "VLLM_SERVER_DEV_MODE=1 for policy.train.kind full, and see that folder (rollout.engine.adapters)"
            ) from None

    def unload(self, client: Client, name: str) -> None:
        """Do nothing: the server keeps the last weights, because it has no others."""


class SleepMode:
    """vLLM's sleep mode: a server on the GPU of the run frees its memory between rollouts. All ranks call both methods; rank 0
    sends the requests.

    At sleep level 1 vLLM moves the weights to CPU memory, and discards the KV cache. The server must be started with
    ``--enable-sleep-mode`` and with its development endpoints (``VLLM_SERVER_DEV_MODE=1``). ``first``: whether this is rank 0.
    ``any_rank``: tells whether a flag is true on at least one rank. Source: vLLM, ``entrypoints/serve/dev/sleep``.
    """

    def __init__(self, *, first: bool = True, any_rank: Callable[[bool], bool] = bool) -> None:
        self._first = first
        self._any_rank = any_rank

    def wake(self, client: Client) -> None:
        """Free the run's unused GPU memory on all ranks, then wake the server. Raises EngineFault on all ranks."""
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()
        self._any_rank(False)  # a rank that still holds memory would leave too little for the server
        self._together(client, asleep=False)

    def sleep(self, client: Client) -> None:
        """Put the server to sleep after all ranks are done with it. Raises EngineFault on all ranks."""
        self._together(client, asleep=True)

    def _together(self, client: Client, *, asleep: bool) -> None:
        otherwise = "rank 0 could not use the vLLM server's sleep mode; its log says why"
        on_all_ranks(lambda: set_asleep(client, asleep=asleep) if self._first else None, self._any_rank, otherwise=otherwise)


def set_asleep(client: Client, *, asleep: bool) -> None:
    """Put the server to sleep or wake it up. Raises EngineFault if this fails, or if the server has no sleep mode."""
    try:
        client.post(SLEEP if asleep else WAKE, {}, tries_of_500=1)
        if is_asleep(client) is not asleep:
            raise EngineFault(f"{client.server} {'did not go to sleep' if asleep else 'did not wake up'}")
    except RequestRefused as refused:
        raise EngineFault(
            f"{client.server} refuses rollout.engine.sleep: {refused}. Start it with VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
        ) from None


def is_asleep(client: Client) -> bool:
    """Whether the server sleeps. Raises RequestRefused if the server has no development endpoints."""
    return json_object(client.get(STATE)).get("is_sleeping") is True


def diagnose_sleep(client: Client) -> tuple[Literal["ok", "note", "FAILED"], str]:
    """Whether the server frees its memory while it sleeps, and is awake: the status of a ``Diagnosis``, and what was found."""
    where = f"the server at {client.url}"
    try:
        asleep, config = is_asleep(client), json_object(client.get(INFO)).get("vllm_config")
    except RequestRefused:
        return "FAILED", f"{where} has no sleep mode: it was started without VLLM_SERVER_DEV_MODE=1"
    model = config.get("model_config") if isinstance(config, dict) else None
    if not isinstance(model, dict) or model.get("enable_sleep_mode") is not True:
        return "FAILED", f"{where} keeps its GPU memory when it sleeps: it was started without --enable-sleep-mode"
    if asleep:
        return "note", f"{where} is asleep, perhaps because a run is using it; nothing else was checked"
    return "ok", f"{where} frees its GPU memory between rollouts"


def wake_and_release(publisher: WeightPublisher, connect: Callable[[], Client], release: Callable[[], None]) -> None:
    """Call ``release`` after waking the server, which does not unload weights in its sleep."""
    if publisher.loaded is not None:
        with connect() as client:
            try:
                set_asleep(client, asleep=False)
            except EngineFault as fault:
                log.warning("%s may still be asleep: %s", client.server, fault)
    release()


@runtime_checkable
class Servable(Protocol):
    """What a model must have so that a server can generate in its place."""

    grammar: Grammar
    stop: tuple[int, ...]
    pad: int
    image_token: int | None

    def resized_images(self, task: Task) -> Sequence[Image]:
        """The task's images at their final size; empty if the images are in the prompt's ids. The server's image processor must not
        resize them, because it uses torchvision, whose pixels differ from PIL's."""
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
        weights: VllmPublisher,
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

        def generate() -> Generation:
            with self._connect() as client:
                if self._sleep_mode is not None:
                    self._sleep_mode.wake(client)
                named = {self._weights.named_by: self._weights.publish(client)}
                if not self._is_checked:
                    self._check_server(client, sampling)
                completions = concurrently(
                    lambda rows: self._completions(client, named, batch, prompts, sampling, rows),
                    consecutive_rows(batch),
                    most=_MAX_CONCURRENT,
                )
            generation = self._generation(prompts, sampling, completions)
            self._check(batch, prompts, generation)
            return generation

        otherwise = "the vLLM server failed on another rank; see the log of that rank"
        generation = on_all_ranks(generate, self._any_rank, otherwise=otherwise)
        if self._sleep_mode is not None:
            with self._connect() as client:
                self._sleep_mode.sleep(client)
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
        self, client: Client, named: dict[NamedBy, str], batch: Batch, prompts: Prompts, sampling: TokenSampling, rows: TaskRows
    ) -> list[ServerCompletion]:
        """The completions of these rows, which have one prompt. ``named``: the weights, as ``GenerateRequest`` names them."""
        request = GenerateRequest(
            **named,
            ids=tuple(prompts.ids[rows.task][prompts.mask[rows.task]].tolist()),
            image_token=self.model.image_token,
            images=tuple(data_url(image) for image in self.model.resized_images(batch.tasks[rows.task])),
            sampling=sampling,
            stop=self.model.stop,
            banned=self._banned,
            seed=group_seed(batch, batch.group_ids[rows.task], "vllm") + rows.slot,
            count=rows.count,
            grammar=self._grammar,
        )
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
            if refused.status == 404 and request.model is not None and request.model in refused.text:
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
