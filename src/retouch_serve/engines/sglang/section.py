"""The recipe section of an SGLang-Diffusion server. torch and httpx are imported only when it is built."""

import importlib.util
import json
import logging
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retouch.config.section import Count, Positive
from retouch.models.base import ImageModel
from retouch.models.train import FullWeights, TrainSection
from retouch.policies.engine import (
    ChainEngineSection,
    DenoisingEngine,
    Diagnosis,
    EngineContext,
    EngineFault,
)
from retouch.protocols import DenoisingModel
from retouch_serve.engines.server_section import ServerSection

if TYPE_CHECKING:
    from retouch_serve.engines.client import Client

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
_STARTING = "start the server as docs/engines.md says"
log = logging.getLogger("retouch")


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
        from retouch.models.common.wrappers import ModelWrapper
        from retouch_serve.engines.publishing import release_weights, remove_folder
        from retouch_serve.engines.sglang.sampling import Promptable, SglangSampling
        from retouch_serve.engines.sglang.weights import TRANSFORMER, LoraPublisher, TransformerPublisher

        while isinstance(model, ModelWrapper):
            model = model.model
        if not isinstance(model, Promptable):
            raise ValueError(f"rollout.engine.kind: sglang samples for {', '.join(FAMILIES)}, and not for {type(model).__name__}")
        if context.in_step:
            raise ValueError("rollout.engine.kind: sglang gets the weights from rank 0, and fsdp2 shards them; use zero2 or none")
        log.warning("rollout.engine: %s", UNTESTED)
        folder = context.folder / "adapters" if self.adapters is None else Path(self.adapters)
        options: dict[str, Any] = {
            "weights": context.weights,
            "folder": folder,
            "prefix": f"retouch-{context.folder.name}",
            "first": context.first,
            "any_rank": context.any_rank,
        }
        publisher: LoraPublisher | TransformerPublisher
        if context.full_weights:
            publisher = TransformerPublisher(save=lambda to: context.save(to / TRANSFORMER), **options)
        else:
            publisher = LoraPublisher(save=context.save, **options)
        own = folder if self.adapters is None else None
        release = partial(release_weights, publisher, self.impatient().connect, own) if context.first else None
        engine = SglangSampling(
            model, connect=self.connect, weights=publisher, images=self.images, any_rank=context.any_rank, release=release
        )
        if release is not None:
            if own is not None:
                remove_folder(own)
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
        from retouch_serve.engines.client import RequestRefused
        from retouch_serve.engines.sglang.weights import CHECKSUM, LIST_LORAS
        from retouch_serve.engines.sglang.wire import GENERATE

        with client:
            try:
                info = json.loads(client.get("/server_info"))
                version, path = str(info["version"]), str(info["model_path"])
                # A server with rollouts refuses a body without a prompt.
                rollouts = _refusal(client, GENERATE) == 422
                (client.post(CHECKSUM, {"module_names": []}) if full_weights else client.get(LIST_LORAS))
            except (EngineFault, RequestRefused, ValueError, KeyError, TypeError) as fault:
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


def _refusal(client: "Client", path: str) -> int | None:
    """The HTTP status with which the server refuses an empty body; None if it accepts it."""
    from retouch_serve.engines.client import RequestRefused

    try:
        client.post(path, {})
    except RequestRefused as refused:
        return refused.status
    return None
