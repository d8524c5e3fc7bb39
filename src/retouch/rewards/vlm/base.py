"""The base class of the ``judge`` sections of a recipe, and the clients that a run opens for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from retouch.config.section import Section
from retouch.rewards.facts import LoadedModel
from retouch.rewards.vlm.questions import JudgeClient

if TYPE_CHECKING:
    import torch


class JudgeModel(Section, ABC):
    """A vision-language model that answers questions about images."""

    changeable: ClassVar[frozenset[str]] = frozenset({"device"})
    """Keys that may differ when a run is resumed, because they do not change any answer."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The model's name and its location (address or folder), for messages."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float | None:
        """Return the cost of these tokens in dollars; None if no price is known."""
        return None

    @abstractmethod
    def open(self, *, device: torch.device | str = "cpu") -> JudgeClient:
        """Open a client of the model. ``device``: the default device of a model in this process, if its section names none.

        Raises ValueError if there is no key in the environment, there are no weights, or a package is not installed.
        """

    def problems(self, path: str) -> Iterator[str]:
        """Yield a message for each pair of keys that contradict each other. ``path``: path of the section in the recipe."""
        yield from ()

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the model if it runs in this process."""
        yield from ()

    def variables(self) -> Iterator[str]:
        """Yield the environment variables that the client needs."""
        yield from ()

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Yield the environment variables of the API keys that the client sends, each with the URL of the server."""
        yield from ()


class JudgeClients:
    """The clients of a run: rewards with equal judge sections share one client. ``device``: the default device of models whose
    section names none."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._opened: dict[str, JudgeClient] = {}

    def open(self, model: JudgeModel) -> JudgeClient:
        """Return the model's client; it is opened at the first call. Raises ValueError as ``JudgeModel.open`` does."""
        name = f"{type(model).__module__}:{type(model).__qualname__} {model.model_dump_json()}"
        if name not in self._opened:
            self._opened[name] = model.open(device=self._device)
        return self._opened[name]
