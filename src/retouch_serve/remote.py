"""The reward of kind ``remote``, in a recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from retouch.protocols import Reward
from retouch.rewards.base import JudgeClients, RewardSection, unchanged
from retouch.types import Column, Json
from retouch_serve.settings import RemoteSettings

if TYPE_CHECKING:
    import torch


class RemoteReward(RemoteSettings, RewardSection):
    """Rewards that ``retouch serve`` hosts, at one or more addresses (docs/serving.md). If the servers require a token, it is read
    from the environment variable RETOUCH_TOKEN, and sent only to addresses that it is bound to.

    Example::

        >>> retouch.rewards.Remote(endpoints=("http://127.0.0.1:8700",)).cli_key
        'endpoints'
    """

    cli_key = "endpoints"
    changeable: ClassVar[frozenset[str]] = frozenset(
        (
            *("endpoints", "encoding", "batch", "concurrency", "timeout", "deadline", "attempts", "retry_share"),
            *("samples_per_minute", "requests_per_minute", "calls", "rate_file", "wait"),
        )
    )

    def known_columns(self) -> Mapping[str, Column] | None:
        """The declared columns; None if the recipe declares none."""
        return None if self.declared is None else {name: Column(low, high) for name, (low, high) in self.declared.items()}

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Build a client that is connected to the servers. Raises ValueError if no server answers, the servers have different
        rewards, a server refuses the token, or a declared column is missing or has another range."""
        if importlib.util.find_spec("httpx") is None:
            raise ValueError("asking reward servers needs httpx: pip install 'retouch[serve]'")
        from retouch_serve.client import RemoteClient

        client = RemoteClient(self)
        for name, (low, high) in (self.declared or {}).items():
            given = client.columns.get(name)
            if given is None or (given.low, given.high) != (low, high):
                found = "have no such column" if given is None else f"declare it from {given.low:g} to {given.high:g}"
                has = ", ".join(f"{column} {c.low:g} to {c.high:g}" for column, c in client.columns.items())
                client.close()
                raise ValueError(
                    f"reward.columns: {name} is declared from {low:g} to {high:g}, but the servers {found}; they have {has}"
                )
        return keep(client)

    @classmethod
    def from_cli(cls, argument: str) -> Json:
        """The list with this one address."""
        return [argument]
