"""Publishes all weights of the policy to a vLLM server, which reloads them from a shared folder whenever they changed.

vLLM reloads weights in place through its development endpoints (``VLLM_SERVER_DEV_MODE=1``). Each response contains the version of
the weights that generated each token, so tokens of other weights are detected, also after a restart of the server.
"""

import json
from typing import Any

from retouch.policies.engine import EngineFault
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.publishing import WeightPublisher
from retouch_serve.engines.wire import ServedWeights

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
            # A failed reload leaves the server without usable weights, so set a version that no request expects.
            client.post(SET_VERSION, {"new_version": f"loading-{name}"})
            client.post(RPC, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}, tries_of_500=1)
            if _field(client.post(RESET, {}), "success") is not True:
                raise EngineFault(f"{client.server} did not clear its prefix cache after new weights were loaded")
            client.post(SET_VERSION, {"new_version": name})
        except RequestRefused as refused:
            raise EngineFault(
                f"{client.server} did not load the weights {folder}: {refused}. It must be started with "
                "VLLM_SERVER_DEV_MODE=1 for policy.train.kind full, and see that folder (rollout.engine.adapters)"
            ) from None

    def unload(self, client: Client, name: str) -> None:
        """Do nothing: the server keeps the last weights, because it has no others."""


def _field(body: bytes, name: str) -> Any:
    """A field of a JSON object; None if the body is not a JSON object."""
    try:
        document = json.loads(body)
    except ValueError:
        return None
    return document.get(name) if isinstance(document, dict) else None
