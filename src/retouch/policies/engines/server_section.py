"""What the recipe's sections of engines behind a server share: its address, its folder, its time limits, and the connection to it.

It imports httpx when it connects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from retouch.config.section import NonNegative, Positive, Section

if TYPE_CHECKING:
    from retouch.policies.engines.client import Client

_IMPATIENT_SECONDS = 10.0


class ServerSection(Section):
    """What every engine behind a server has."""

    client: ClassVar[Mapping[str, Any]]
    """Options of ``engines.client.Client``. ``kind`` names the server, and in lower case the extra that installs httpx."""
    url: str
    """Address of the server."""
    adapters: str | None = None
    """Folder for adapters or weights, which the server must see under the same path; null takes ``adapters`` in the run's own."""
    timeout: Positive = 300.0
    """Seconds without any data from the server after which a request is sent again."""
    patience: NonNegative = 600.0
    """Seconds over which an unreachable, busy or broken server is tried again; then the run stops with a checkpoint."""

    def connect(self) -> Client:
        """A new connection to the server. ValueError if httpx is not installed."""
        try:
            from retouch.policies.engines.client import Client
        except ModuleNotFoundError as error:
            if error.name != "httpx":
                raise
            kind = self.client["kind"]
            raise ValueError(f"requests to the {kind} server need httpx: pip install 'retouch[{kind.lower()}]'") from None
        return Client(self.url, timeout=self.timeout, patience=self.patience, **self.client)

    def impatient(self) -> ServerSection:
        """The same server, asked once and not for long."""
        return self.model_copy(update={"timeout": min(self.timeout, _IMPATIENT_SECONDS), "patience": 0.0})
