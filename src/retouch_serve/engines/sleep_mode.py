"""vLLM's sleep mode: a server on the GPU of the run frees its memory between rollouts.

At sleep level 1 vLLM moves the weights to CPU memory, and discards the KV cache. The server must be started with
``--enable-sleep-mode`` and with its development endpoints (``VLLM_SERVER_DEV_MODE=1``).

Source: vLLM, ``entrypoints/serve/dev/sleep``.
"""

import gc
import json
from collections.abc import Callable
from typing import Any

import torch

from retouch.policies.engine import EngineFault
from retouch_serve.engines.client import Client, RequestRefused

SLEEP, WAKE, STATE, INFO = "/sleep?level=1&mode=wait", "/wake_up", "/is_sleeping", "/server_info?config_format=json"


class SleepMode:
    """Wakes the server before a rollout, and puts it to sleep after the rollout. All ranks call both methods; rank 0 sends the
    requests.

    ``first``: whether this is rank 0. ``any_rank``: tells whether a flag is true on at least one rank.
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
        fault = None
        if self._first:
            try:
                set_asleep(client, asleep=asleep)
            except EngineFault as found:
                fault = found
        if self._any_rank(fault is not None):
            raise fault or EngineFault("rank 0 could not use the vLLM server's sleep mode; its log says why")


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
    return _document(client.get(STATE)).get("is_sleeping") is True


def frees_memory(client: Client) -> bool:
    """Whether the server was started with ``--enable-sleep-mode``; without this flag it keeps its memory while it sleeps."""
    config = _document(client.get(INFO)).get("vllm_config")
    model = config.get("model_config") if isinstance(config, dict) else None
    return isinstance(model, dict) and model.get("enable_sleep_mode") is True


def _document(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
