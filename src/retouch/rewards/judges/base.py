"""What all judges have in common: the model that they ask, how often, and the panel that does so."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from retouch.config.section import Count
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, unchanged
from retouch.rewards.facts import LoadedModel, RunFacts
from retouch.rewards.judges.panel import Panel
from retouch.rewards.judges.rubrics import fingerprint, rubric
from retouch.rewards.vlm.base import JudgeClients
from retouch.rewards.vlm.models import AnyJudgeModel
from retouch.rewards.vlm.questions import JudgeClient
from retouch.types import Sample, Scores

if TYPE_CHECKING:
    import torch


class JudgeReward(RewardSection):
    """A reward that asks a vision-language model."""

    # Derived classes phrase the prompts of a sample, ask ``self.panel`` and return columns.

    judge: AnyJudgeModel
    """The model that answers."""
    n_evals: Count = 1
    """Number of answers to each question, each with its own seed. A score is their mean, and missing if one answer is missing."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature of the answers; 0 gives the same answer every time, so it needs ``n_evals`` 1."""
    seed: Annotated[int, Field(ge=0, lt=2**30)] = 0
    """Seed of the first answer; the next ones count up from it."""

    asks_judge: ClassVar[bool] = True
    rubrics: ClassVar[tuple[str, ...]] = ()
    """The files in ``prompts/`` that it may use; they are part of its fingerprint."""
    questions: ClassVar[tuple[tuple[str, int], ...]] = ()
    """For each question about a sample: its rubric, and the number of images in it. For estimates of calls and tokens."""
    one_token: ClassVar[bool] = False
    """Whether an answer is one token."""

    @property
    def panel(self) -> Panel:
        """The panel, whose client is opened at the first use where ``build`` has not opened it."""
        panel: Panel = self.model
        return panel

    @property
    def settings(self) -> str:
        """The keys that decide a score, beside the rubrics and the panel. Part of the fingerprint, so its wording stays."""
        return ""

    @property
    def fingerprint(self) -> str:
        """The panel, the rubrics and the settings."""
        shown = f"rubrics {fingerprint(*(rubric(name) for name in self.rubrics))}" if self.rubrics else ""
        return "; ".join(part for part in (self.panel.identity, shown, self.settings) if part)

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> Scores: ...

    def submit(self, samples: Sequence[Sample]) -> Future[Scores]:
        """Score in the background; calls may overtake each other."""
        return self.panel.threads.submit(self, samples)

    def close(self) -> None:
        """End the threads, and close the client's connections."""
        if self._model is not None:
            self._model.close()

    def load(self, device: torch.device | str) -> Panel:
        """A panel with a client of its own. ValueError as ``JudgeModel.open``."""
        return self._panel(self.judge.open(device=device))

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """The reward with an open client: the one that ``clients`` has for its model."""
        clients = JudgeClients(device) if clients is None else clients
        return keep(self.with_model(self._panel(clients.open(self.judge))))

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Repeats that cannot differ, and what is wrong with the model's section."""
        yield from super().problems(path, prefix, run)
        if self.n_evals > 1 and self.temperature == 0:
            same = f"{self.n_evals} answers at temperature 0 are one answer"
            yield f"{path}.n_evals: {same}; give a temperature, 0.7 say, or n_evals 1"
        yield from self.judge.problems(f"{path}.judge")

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Its own, and how the model is reached."""
        yield from super().changeable_paths(path)
        for key in self.judge.changeable:
            yield f"{path}.judge.{key}"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """The model, where it runs in this process."""
        yield from self.judge.loaded_models()

    def variables(self) -> Iterator[tuple[str, str]]:
        """The variables of the model's keys."""
        for variable in self.judge.variables():
            yield variable, self.judge.description

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Those of the model."""
        yield from self.judge.keys_sent()

    def _panel(self, client: JudgeClient) -> Panel:
        return Panel(client, repeats=self.n_evals, temperature=self.temperature, seed=self.seed)
