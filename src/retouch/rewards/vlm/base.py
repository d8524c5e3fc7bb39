"""The models that answer a judge's questions, as sections of a recipe; and the clients that a run opens for them."""

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
    """Keys that may differ when a run is resumed, since they change no answer."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The model's name and where it is asked, for messages."""

    def cost(self, *, input_tokens: float, output_tokens: float) -> float | None:
        """What so many tokens cost in dollars; None if no price is known."""
        return None

    @abstractmethod
    def open(self, *, device: torch.device | str = "cpu") -> JudgeClient:
        """A client of the model. ``device``: for a model in this process whose section names none.

        ValueError: no key in the environment, no weights, or a package that is not installed.
        """

    def problems(self, path: str) -> Iterator[str]:
        """A line for everything in the section that does not go together. ``path``: of the section in the recipe."""
        yield from ()

    def loaded_models(self) -> Iterator[LoadedModel]:
        """The model, where it runs in this process."""
        yield from ()

    def variables(self) -> Iterator[str]:
        """The environment variables that it needs."""
        yield from ()

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """The environment variables of keys that it sends, each with the URL of the server."""
        yield from ()


class JudgeClients:
    """The clients of a run: one for each model, however many rewards name it. ``device``: for models whose section names none."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._opened: dict[str, JudgeClient] = {}

    def open(self, model: JudgeModel) -> JudgeClient:
        """The model's client. ValueError as ``JudgeModel.open``."""
        name = f"{type(model).__module__}:{type(model).__qualname__} {model.model_dump_json()}"
        if name not in self._opened:
            self._opened[name] = model.open(device=self._device)
        return self._opened[name]
