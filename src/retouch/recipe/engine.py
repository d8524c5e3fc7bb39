"""Sections of a recipe about what writes while a writer learns: the model itself, or a server."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import NonNegative, Positive, Section


class _Engine(Section):
    """What every engine has; its own account of probabilities is compared with the policy's wherever the two may differ."""

    max_mismatch: Positive = 0.1
    """The run stops where the engine's log-probabilities differ from the policy's by more nats than this, in a rollout's mean."""


class CachedEngine(_Engine):
    """The policy's own model, token by token with its cache. Its numbers are the policy's to rounding in float32."""

    kind: Literal["cached"]
    truncate_at: Annotated[float, Field(ge=1.0)] | None = None
    """Tokens are weighted by the policy's probability over the engine's, up to this; null does not weight."""


class VllmEngine(_Engine):
    """A vLLM server that holds the base weights; the adapter is loaded into it after each update.

    Written for the interface of vLLM 0.33.0 and tested against a strict double of it; never run on vLLM. For LoRA alone. A server
    that writes image tokens needs a plug-in that keeps to their grammar (docs/engines.md).
    """

    kind: Literal["vllm"]
    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+(/v1)?/?$")]
    """Where the server answers, ``http://127.0.0.1:8000`` say; its key, if it asks for one, comes from ``VLLM_API_KEY`` alone."""
    adapters: str | None = None
    """Folder for the adapters, which the server must see under the same path; null takes ``adapters`` in the run's own."""
    truncate_at: Annotated[float, Field(ge=1.0)] | None = 3.0
    """Tokens are weighted by the policy's probability over the engine's, up to this; null does not weight."""
    timeout: Positive = 300.0
    """Seconds without a sign of the server after which a request is tried again."""
    patience: NonNegative = 600.0
    """Seconds over which a server that is away, busy or broken is tried again; then the run stops with a checkpoint."""


Engine: TypeAlias = Annotated[CachedEngine | VllmEngine, Field(discriminator="kind")]
