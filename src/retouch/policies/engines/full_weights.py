"""All weights of the policy in a vLLM server, reloaded from a shared folder whenever they changed.

vLLM reloads weights in place through its development endpoints (``VLLM_SERVER_DEV_MODE=1``). Each response says with which version
of the weights every token was generated, so tokens of other weights are noticed, also after the server was restarted.
"""

import json
from typing import Any

from retouch.policies.engines.base import EngineFault
from retouch.policies.engines.client import Client, RequestRefused
from retouch.policies.engines.publishing import WeightPublisher
from retouch.policies.engines.wire import ServedWeights

RPC, VERSION, SET_VERSION, RESET = "/collective_rpc", "/weight_info", "/update_weight_version", "/reset_prefix_cache"


class FullWeightPublisher(WeightPublisher[ServedWeights]):
    """Keeps all weights of the server equal to the policy's. ``save`` writes a folder of safetensors in transformers' layout."""

    def served(self, name: str) -> ServedWeights:
        return ServedWeights(version=name)

    def load(self, client: Client, name: str) -> None:
        folder = (self._folder / name).absolute()
        try:
            if _field(client.get(VERSION), "weight_version") == name:
                return
            # A reload that fails leaves the server without usable weights, so no version that anybody asks for may be set.
            client.post(SET_VERSION, {"new_version": f"loading-{name}"})
            client.post(RPC, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, tries_of_500=1)
            if _field(client.post(RESET, {}), "success") is not True:
                raise EngineFault(f"the vLLM server at {client.url} did not clear its prefix cache after new weights were loaded")
            client.post(SET_VERSION, {"new_version": name})
        except RequestRefused as refused:
            raise EngineFault(
                f"the vLLM server at {client.url} did not load the weights {folder}: {refused}. It must be started with "
                "VLLM_SERVER_DEV_MODE=1 for policy.train.kind full, and see that folder (rollout.engine.adapters)"
            ) from None

    def unload(self, client: Client, name: str) -> None:
        """The server keeps the last weights: it has no others."""


def _field(body: bytes, name: str) -> Any:
    """A field of a JSON object; None if the body is none."""
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document.get(name) if isinstance(document, dict) else None
