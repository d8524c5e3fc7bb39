"""The recipe section of a vLLM server that generates completions. torch and httpx are imported only when it is built."""

import importlib.util
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retouch.config import keys
from retouch.policies.engine import Diagnosis, Engine, EngineContext, EngineFault, EngineSection, TokenSampling
from retouch.protocols import AutoregressiveModel
from retouch_serve.engines.server_section import ServerSection

if TYPE_CHECKING:
    from retouch_serve.engines.client import Client
    from retouch_serve.engines.publishing import WeightPublisher

MAX_TEMPERATURE = 2.0
TESTED = ("0.32.0",)
"""The versions of vLLM with which this engine is tested."""
_STARTING = "start the server as docs/engines.md says"
log = logging.getLogger("retouch")


class VllmEngine(ServerSection, EngineSection):
    """A vLLM server, into which the adapter or all weights are loaded after each update.

    Tested against vLLM 0.32.0 on a CPU, and not on a GPU. A server that generates image tokens needs a plug-in that applies their
    grammar (docs/engines.md).

    Source: vLLM (Kwon et al. 2023, arXiv 2309.06180).
    """

    client = MappingProxyType({"kind": "vLLM", "key": keys.VLLM_KEY})
    kind: Literal["vllm"] = "vllm"
    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+(/v1)?/?$")]
    """Address of the server, for example ``http://127.0.0.1:8000``. Its key, if any, is read only from ``VLLM_API_KEY``."""
    truncate_at: Annotated[float, Field(ge=1.0)] | None = 3.0
    """Each token's loss is multiplied by the policy's probability / the engine's, at most by this; null uses no weights."""
    sleep: bool = Field(default=False, exclude_if=operator.not_)
    """Whether the server frees its GPU memory between rollouts (vLLM's sleep mode), so that it can use the same GPU as the run."""

    def build(self, model: AutoregressiveModel, context: EngineContext) -> Engine:
        """Build the engine. Raises ValueError if httpx is not installed, or if the server cannot generate for this model."""
        self.connect().close()  # first, so that a missing httpx is reported before anything else
        from retouch_serve.engines.adapters import AdapterPublisher
        from retouch_serve.engines.full_weights import FullWeightPublisher
        from retouch_serve.engines.publishing import remove_folder
        from retouch_serve.engines.sleep_mode import SleepMode
        from retouch_serve.engines.vllm_decoding import Servable, VllmDecoding

        if not isinstance(model, Servable):
            raise ValueError(
                f"rollout.engine.kind: vllm sends images as the model sees them, and {type(model).__name__} has no "
                "`resized_images`; see retouch_serve.engines.vllm_decoding.Servable, or use cached"
            )
        log.info("rollout.engine: tested against vLLM %s on a CPU, and not on a GPU", ", ".join(TESTED))
        folder = context.folder / "adapters" if self.adapters is None else Path(self.adapters)
        if context.full_weights and context.in_step:
            raise ValueError(
                "rollout.engine.kind: vllm gets all weights from rank 0, and with this sharding no rank has them; use sharding "
                "zero2 or none, or policy.train.kind lora"
            )
        publisher = (FullWeightPublisher if context.full_weights else AdapterPublisher)(
            weights=context.weights,
            save=context.save,
            folder=folder,
            prefix=f"retouch-{context.folder.name}",
            first=context.first,
            any_rank=context.any_rank,
        )
        own = folder if self.adapters is None else None
        release = partial(_close, publisher, self.impatient().connect, own, wakes=self.sleep) if context.first else None
        engine = VllmDecoding(
            model,
            connect=self.connect,
            weights=publisher,
            any_rank=context.any_rank,
            release=release,
            sleep_mode=SleepMode(first=context.first, any_rank=context.any_rank) if self.sleep else None,
        )
        if release is not None:
            if own is not None:
                remove_folder(own)
            weakref.finalize(engine, release)  # for callers that never close the engine
        return engine

    def problems(self, sampling: TokenSampling, *, full_weights: bool, image_grammar: bool) -> Iterator[str]:
        if sampling.temperature > MAX_TEMPERATURE:
            yield f"temperature: vllm does not accept {sampling.temperature:g}; use {MAX_TEMPERATURE:g} or less, or engine cached"
        if image_grammar and sampling.truncates:
            yield (
                "top_k, top_p: vllm does not report which tokens they kept if the plug-in applies the grammar; remove both, or "
                "use engine cached"
            )
        elif sampling.top_p is not None and sampling.top_p < 1 and sampling.top_k is None:
            yield "top_p: vllm reports which tokens it kept only if top_k is set too; set top_k, for example to 1000"

    def diagnose(
        self, sampling: TokenSampling, *, base_model: str | None, full_weights: bool, image_grammar: bool
    ) -> Iterator[Diagnosis]:
        """Check that the server answers, serves the base model, can load weights, and reports what it samples."""
        try:
            client = self.impatient().connect()
        except ValueError as error:
            package = importlib.util.find_spec("httpx") is None
            yield "FAILED", str(error), "pip install 'retouch[vllm]'" if package else keys.binding_command(keys.VLLM_KEY, self.url)
            return
        from retouch_serve.engines.server import has_plugin, query_sampling, query_server
        from retouch_serve.engines.wire import PLUGIN

        with client:
            try:
                if self.sleep:
                    found = tuple(_diagnose_sleep(client))
                    yield from found
                    if any(status != "ok" for status, _, _ in found):
                        return  # a sleeping server does not answer requests to generate
                server = query_server(client)
                lacks_plugin = image_grammar and server.takes_ids and not has_plugin(client)
                reports = query_sampling(client) if server.takes_ids else None
            except EngineFault as fault:
                yield "FAILED", str(fault), _STARTING
                return
        if os.environ.get(keys.VLLM_KEY):
            yield "ok", f"the key in {keys.VLLM_KEY} goes to {keys.address_of(self.url)}", ""
        where = f"vLLM {server.version} at {client.url}"
        yield "ok", f"{where} serves {server.base.root or server.base.id}", ""
        yield "note", f"this engine is tested against vLLM {', '.join(TESTED)} on a CPU, and not on a GPU", ""
        if server.version not in TESTED:
            yield "note", f"{where} may differ from {' and '.join(TESTED)}, with which this is tested", ""
        if base_model and server.base.root not in (None, base_model):
            yield "note", f"it serves {server.base.root}, and policy.model.path is {base_model}; the weights must be the same", ""
        if full_weights:
            if not server.reloads:
                text = f"{where} does not reload weights: it was started without VLLM_SERVER_DEV_MODE=1"
                yield "FAILED", text, _STARTING
        elif not server.loads_adapters:
            text = f"{where} does not load LoRAs: it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            yield "FAILED", text, _STARTING
        elif not server.has_lora:
            yield "FAILED", f"{where} loads no LoRA: it was started without --enable-lora", _STARTING
        if not server.takes_ids:
            yield "FAILED", f"{where} accepts no token ids: it was started without --enable-scale-out", _STARTING
        if lacks_plugin:
            text = f"{where} does not apply the grammar of image tokens: it was started without --logits-processors {PLUGIN}"
            yield "FAILED", text, _STARTING
        if reports is not None and not reports.processed:
            text = f"{where} returns raw log-probabilities: it was started without --logprobs-mode processed_logprobs"
            yield "FAILED", text, _STARTING
        if reports is not None and sampling.truncates and not reports.returns_mask:
            text = f"{where} does not report what top_k and top_p kept: it was started without --return-sampling-mask"
            yield "FAILED", text, _STARTING
        if reports is not None and reports.returns_mask and sampling.top_k is None:
            text = f"{where} answers only requests with top_k: it was started with --return-sampling-mask"
            yield "FAILED", text, "start the server without that flag, or set rollout.top_k"
        if server.base.max_model_len is not None and server.base.max_model_len <= sampling.max_new_tokens:
            text = f"{where} allows {server.base.max_model_len} tokens, prompt and completion together"
            yield "FAILED", text, _STARTING


def _diagnose_sleep(client: "Client") -> Iterator[Diagnosis]:
    from retouch_serve.engines.client import RequestRefused
    from retouch_serve.engines.sleep_mode import frees_memory, is_asleep

    try:
        asleep, frees = is_asleep(client), frees_memory(client)
    except RequestRefused:
        yield "FAILED", f"the server at {client.url} has no sleep mode: it was started without VLLM_SERVER_DEV_MODE=1", _STARTING
        return
    if not frees:
        text = f"the server at {client.url} keeps its GPU memory when it sleeps: it was started without --enable-sleep-mode"
        yield "FAILED", text, _STARTING
    elif asleep:
        yield "note", f"the server at {client.url} is asleep, perhaps because a run is using it; nothing else was checked", ""
    else:
        yield "ok", f"the server at {client.url} frees its GPU memory between rollouts", ""


def _close(publisher: "WeightPublisher[Any]", connect: "Callable[[], Client]", folder: Path | None, *, wakes: bool) -> None:
    """Unload the run's weights from the server, and remove ``folder`` if it is given. ``wakes``: wake the server first."""
    from retouch_serve.engines.publishing import release_weights
    from retouch_serve.engines.sleep_mode import set_asleep

    if publisher.has_loaded and wakes:
        with connect() as client:
            try:
                set_asleep(client, asleep=False)
            except EngineFault as fault:
                log.warning("%s may still be asleep: %s", client.server, fault)
    release_weights(publisher, connect, folder)
