"""The fields that the recipe sections of all engines with a server share: address, folder and time limits.

httpx is imported only when a connection is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from retouch.config.section import NonNegative, Positive, Section

if TYPE_CHECKING:
    from retouch_serve.engines.client import Client

_IMPATIENT_SECONDS = 10.0


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

    def impatient(self) -> ServerSection:
        """A copy of this section for a single try with a short timeout."""
        return self.model_copy(update={"timeout": min(self.timeout, _IMPATIENT_SECONDS), "patience": 0.0})
