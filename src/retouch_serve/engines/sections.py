"""The recipe sections of the engines with a server: vLLM for completions, SGLang for denoising chains.

torch and httpx are imported only when an engine is built.
"""

from __future__ import annotations

import importlib.util
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from retouch.config import keys
from retouch.config.section import Count, NonNegative, Positive, Section
from retouch.models.base import ImageModel
from retouch.models.train import FullWeights, TrainSection
from retouch.policies.engine import EngineFault, TokenSampling
from retouch.policies.rollout import ChainEngineSection, DenoisingEngine, Diagnosis, Engine, EngineContext, EngineSection
from retouch.protocols import AutoregressiveModel, DenoisingModel

if TYPE_CHECKING:
    from retouch_serve.engines.client import Client, WeightPublisher

MAX_TEMPERATURE = 2.0
TESTED = ("0.32.0",)
"""The versions of vLLM with which this engine is tested."""
READ = "0.5.23"
"""The version of SGLang whose source code this engine follows."""
FAMILIES = ("qwen-image", "flux", "sd3")
"""The models for which SGLang's server uses the schedule, the prompts and the guidance of diffusers."""
EMBEDDED_GUIDANCE = 3.5
"""The guidance value that the server passes to FLUX.1-dev; requests cannot change it."""
UNTESTED = "this engine is tested against the sources of SGLang 0.5.23, and has not been run against a server, which needs a GPU"
_JOINED = ("add_q_proj", "add_k_proj", "add_v_proj")
"""The projections of Qwen-Image's text tokens that are one layer in SGLang."""
_LARGEST_RESPONSE = 4 * 2**30
_IMPATIENT_SECONDS = 10.0
_STARTING = "start the server as docs/engines.md says"
log = logging.getLogger("retouch")


class ServerSection(Section):
    """Base class of the sections of engines with a server."""

    client: ClassVar[Mapping[str, Any]]
    """Options of ``engines.client.Client``. ``kind`` names the server, and in lower case the extra that installs httpx."""
    url: str
    """Address of the server."""
    adapters: str | None = None
    """Folder for adapters or weights, which the server must see under the same path; null: ``adapters`` in the run's folder."""
    timeout: Positive = 300.0
    """Seconds without any data from the server after which a request is sent again."""
    patience: NonNegative = 600.0
    """Seconds over which requests to an unreachable, busy or broken server are retried; then the run stops with a checkpoint."""

    def connect(self) -> Client:
        """Open a new connection to the server. Raises ValueError if httpx is not installed."""
        try:
            from retouch_serve.engines.client import Client
        except ModuleNotFoundError as error:
            if error.name != "httpx":
                raise
            kind = self.client["kind"]
            raise ValueError(f"requests to the {kind} server need httpx: pip install 'retouch[{kind.lower()}]'") from None
        return Client(self.url, timeout=self.timeout, patience=self.patience, **self.client)

    def impatient(self) -> Self:
        """A copy of this section for a single try with a short timeout."""
        return self.model_copy(update={"timeout": min(self.timeout, _IMPATIENT_SECONDS), "patience": 0.0})

    def publishing(self, context: EngineContext) -> dict[str, Any]:
        """The arguments of the publisher of the run's weights."""
        return {
            "weights": context.weights,
            "save": context.save,
            "folder": context.folder / "adapters" if self.adapters is None else Path(self.adapters),
            "prefix": f"retouch-{context.folder.name}",
            "first": context.first,
            "any_rank": context.any_rank,
        }

    def releasing(self, context: EngineContext, publisher: WeightPublisher) -> Callable[[], None] | None:
        """A function that takes the weights back from the server and removes the run's own folder of weights, which is removed now
        too; None on ranks that load no weights."""
        if not context.first:
            return None
        from retouch_serve.engines import client

        own = context.folder / "adapters" if self.adapters is None else None
        if own is not None:
            client.remove_folder(own)
        return partial(client.release_weights, publisher, self.impatient().connect, own)


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
        from retouch_serve.engines.vllm import (
            AdapterPublisher,
            FullWeightPublisher,
            Servable,
            SleepMode,
            VllmDecoding,
            wake_and_release,
        )

        if not isinstance(model, Servable):
            raise ValueError(
                f"rollout.engine.kind: vllm sends images as the model sees them, and {type(model).__name__} has no "
                "`resized_images`; see retouch_serve.engines.vllm.Servable, or use cached"
            )
        log.info("rollout.engine: tested against vLLM %s on a CPU, and not on a GPU", ", ".join(TESTED))
        if context.full_weights and context.sharded:
            raise ValueError(
                "rollout.engine.kind: vllm gets all weights from rank 0, and with this sharding no rank has them; use sharding "
                "zero2 or none, or policy.train.kind lora"
            )
        publisher = (FullWeightPublisher if context.full_weights else AdapterPublisher)(**self.publishing(context))
        release = self.releasing(context, publisher)
        if release is not None and self.sleep:
            release = partial(wake_and_release, publisher, self.impatient().connect, release)
        sleep_mode = SleepMode(first=context.first, any_rank=context.any_rank) if self.sleep else None
        engine = VllmDecoding(
            model, connect=self.connect, weights=publisher, any_rank=context.any_rank, release=release, sleep_mode=sleep_mode
        )
        if release is not None:
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
        from retouch_serve.engines.vllm import diagnose_sleep
        from retouch_serve.engines.vllm_wire import PLUGIN, has_plugin, query_sampling, query_server

        with client:
            try:
                if self.sleep:
                    status, text = diagnose_sleep(client)
                    yield status, text, _STARTING if status == "FAILED" else ""
                    if status != "ok":
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
        lora, longest = not full_weights, server.base.max_model_len
        raw = reports is not None and not reports.processed
        no_mask = reports is not None and sampling.truncates and not reports.returns_mask
        faults = {
            "does not reload weights: it was started without VLLM_SERVER_DEV_MODE=1": full_weights and not server.reloads,
            "does not load LoRAs: it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True": lora and not server.loads_adapters,
            "loads no LoRA: it was started without --enable-lora": lora and server.loads_adapters and not server.has_lora,
            "accepts no token ids: it was started without --enable-scale-out": not server.takes_ids,
            f"does not apply the grammar of image tokens: it was started without --logits-processors {PLUGIN}": lacks_plugin,
            "returns raw log-probabilities: it was started without --logprobs-mode processed_logprobs": raw,
            "does not report what top_k and top_p kept: it was started without --return-sampling-mask": no_mask,
            f"allows {longest} tokens, prompt and completion together": longest is not None and longest <= sampling.max_new_tokens,
        }
        yield from (("FAILED", f"{where} {fault}", _STARTING) for fault, found in faults.items() if found)
        if reports is not None and reports.returns_mask and sampling.top_k is None:
            text = f"{where} answers only requests with top_k: it was started with --return-sampling-mask"
            yield "FAILED", text, "start the server without that flag, or set rollout.top_k"


class SglangEngine(ServerSection, ChainEngineSection):
    """An SGLang-Diffusion server, into which the adapter or all weights are loaded after each update. Supports text-to-image with
    Qwen-Image, FLUX.1 and Stable Diffusion 3.

    Tested against the source code of SGLang 0.5.23, but not run with a server, which needs a GPU (docs/engines.md).

    Source: SGLang (Zheng et al. 2024, arXiv 2312.07104), its rollout interface.
    """

    client = MappingProxyType({"kind": "SGLang", "key": None, "max_bytes": _LARGEST_RESPONSE})
    kind: Literal["sglang"] = "sglang"
    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+/?$")]
    """Address of the server, for example ``http://127.0.0.1:30000``. The server has no key, so nobody else may reach it."""
    images: Count = 8
    """Number of images per request. A response contains their states and the decoded images: about 10 MB for each image of 1024
    pixels, and 1 MB for each of its actions."""
    timeout: Positive = 1800.0
    """Seconds without any data from the server after which a request is sent again. Images take longer than tokens."""

    def build(self, model: DenoisingModel, context: EngineContext) -> DenoisingEngine:
        """Build the engine. Raises ValueError if httpx is not installed, or if the server cannot sample for this model."""
        self.connect().close()  # first, so that a missing httpx is reported before anything else
        from retouch.models.pipeline import ModelWrapper
        from retouch_serve.engines.sglang import TRANSFORMER, LoraPublisher, Promptable, SglangSampling, TransformerPublisher

        while isinstance(model, ModelWrapper):
            model = model.model
        if not isinstance(model, Promptable):
            raise ValueError(f"rollout.engine.kind: sglang samples for {', '.join(FAMILIES)}, and not for {type(model).__name__}")
        if context.sharded:
            raise ValueError("rollout.engine.kind: sglang gets the weights from rank 0, and fsdp2 shards them; use zero2 or none")
        log.warning("rollout.engine: %s", UNTESTED)
        options = self.publishing(context)
        publisher: LoraPublisher | TransformerPublisher
        if context.full_weights:
            publisher = TransformerPublisher(**options | {"save": lambda to: context.save(to / TRANSFORMER)})
        else:
            publisher = LoraPublisher(**options)
        release = self.releasing(context, publisher)
        engine = SglangSampling(
            model, connect=self.connect, weights=publisher, images=self.images, any_rank=context.any_rank, release=release
        )
        if release is not None:
            weakref.finalize(engine, release)  # for callers that never close the engine
        return engine

    def problems(
        self,
        key: str,
        *,
        transition: str,
        noise_level: float | None,
        shared_noise: bool,
        branches: bool,
        model: ImageModel,
        train: TrainSection,
    ) -> Iterator[str]:
        if model.kind not in FAMILIES:
            yield f"{key}.engine.kind: sglang samples for {', '.join(FAMILIES)}, and not for {model.kind}; remove the engine"
        if transition not in ("sde", "cps"):
            ode = transition == "ode"
            why = "has no log-probabilities, with which the server is checked" if ode else "is not supported by SGLang"
            yield f"{key}.transition.kind: {transition} {why}; use sde or cps, or remove the engine"
        elif not noise_level:
            yield f"{key}.transition.noise_level: SGLang has no log-probabilities without noise; use more than 0"
        if shared_noise:
            yield f"{key}.shared_noise: SGLang draws different noise for each image; remove it, or the engine"
        if branches:
            yield f"{key}.window.mode: in SGLang, images cannot share steps of a chain; use window, or remove the engine"
        if getattr(model, "guidance", None) not in (None, EMBEDDED_GUIDANCE):
            yield f"policy.model.guidance: SGLang's server gives FLUX {EMBEDDED_GUIDANCE}; use null, or remove the engine"
        lora = getattr(train, "lora", None)
        if not isinstance(train, FullWeights) and lora is not train:
            yield f"policy.train.kind: {getattr(train, 'kind', 'this')} cannot be loaded into SGLang; use lora or full"
        elif lora is not None and not float(lora.alpha).is_integer():
            yield f"policy.train.alpha: SGLang accepts only whole numbers, not {lora.alpha:g}"
        if lora is not None and model.kind == "qwen-image":
            targets = lora.layers(model.lora_targets)
            found = [name for name in _JOINED if any(f".attn.{name}".endswith(f".{target}") for target in targets)]
            if 0 < len(found) < len(_JOINED):
                yield (
                    f"policy.train.targets: SGLang joins {', '.join(_JOINED)} in one layer and ignores an adapter of "
                    f"{', '.join(found)} alone; use all three or none"
                )

    def diagnose(self, *, base_model: str | None, full_weights: bool) -> Iterator[Diagnosis]:
        """Check that the server answers, serves the base model, samples rollouts, and can load and compare weights."""
        try:
            client = self.impatient().connect()
        except ValueError as error:
            assert importlib.util.find_spec("httpx") is None
            yield "FAILED", str(error), "pip install 'retouch[sglang]'"
            return
        from retouch_serve.engines.client import RequestRefused, json_object
        from retouch_serve.engines.sglang import CHECKSUM, GENERATE, LIST_LORAS

        with client:
            try:
                info = json_object(client.get("/server_info"))
                version, path = str(info["version"]), str(info["model_path"])
                # A server with rollouts refuses a body without a prompt.
                rollouts = client.refusal(GENERATE, {}) == 422
                (client.post(CHECKSUM, {"module_names": []}) if full_weights else client.get(LIST_LORAS))
            except (EngineFault, RequestRefused, KeyError) as fault:
                text = str(fault) if isinstance(fault, EngineFault) else f"{client.server}: {fault}"
                yield "FAILED", text, _STARTING
                return
        where = f"SGLang {version} at {client.url}"
        yield "ok", f"{where} serves {path}", ""
        yield "note", UNTESTED, ""
        if version != READ:
            yield "note", f"{where} may differ from {READ}, whose sources this follows", ""
        if base_model and path != base_model:
            yield "note", f"it serves {path}, and policy.model.path is {base_model}; the weights must be the same", ""
        if not rollouts:
            yield "FAILED", f"{where} has no {GENERATE}", _STARTING
