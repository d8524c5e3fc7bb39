"""Publishes the policy's LoRA to a vLLM server, under a new name whenever its weights changed.

An adapter's name contains a digest of its weights. So the server's prefix cache, which is keyed by the name, is never stale, and
loading the same adapter twice does no harm.
"""

import logging

from retouch.policies.engine import EngineFault
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.publishing import WeightPublisher
from retouch_serve.engines.wire import ServedWeights

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
log = logging.getLogger("retouch")


class AdapterPublisher(WeightPublisher[ServedWeights]):
    """Keeps the server's adapter equal to the policy's. ``save`` writes PEFT's format."""

    def served(self, name: str) -> ServedWeights:
        return ServedWeights(model=name)

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
