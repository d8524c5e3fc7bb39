"""The base class of all judges: the model that answers, the number of answers, and the panel that sends the questions."""

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
from retouch.rewards.judges.rubrics import Panel, fingerprint, rubric
from retouch.rewards.vlm.base import JudgeClients
from retouch.rewards.vlm.models import AnyJudgeModel
from retouch.rewards.vlm.questions import JudgeClient
from retouch.types import Sample, Scores

if TYPE_CHECKING:
    import torch


class JudgeReward(RewardSection):
    """A reward that asks a vision-language model."""

    # Derived classes write the prompts for a sample, call ``self.panel.judge`` and return columns.

    judge: AnyJudgeModel
    """The model that answers."""
    n_evals: Count = 1
    """Number of answers to each question, each with its own seed. A score is their mean; it is missing if one answer is missing."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature of the answers. At 0 all answers are the same, so ``n_evals`` must be 1."""
    seed: Annotated[int, Field(ge=0, lt=2**30)] = 0
    """Seed of the first answer; the next answers have the seeds ``seed + 1``, ``seed + 2`` and so on."""

    asks_judge: ClassVar[bool] = True
    rubrics: ClassVar[tuple[str, ...]] = ()
    """The files in ``prompts/`` that the reward may use; they are part of its fingerprint."""
    questions: ClassVar[tuple[tuple[str, int], ...]] = ()
    """For each question about a sample: its rubric and its number of images. Used to estimate calls and tokens."""
    one_token: ClassVar[bool] = False
    """Whether an answer is one token."""

    @property
    def panel(self) -> Panel:
        """The panel. Its client is opened at the first use, if ``build`` has not opened it."""
        panel: Panel = self.model
        return panel

    @property
    def settings(self) -> str:
        """The settings that affect a score, except the rubrics and the panel. They are part of the fingerprint, so the text must
        not change."""
        return ""

    @property
    def fingerprint(self) -> str:
        """The panel, the rubrics and the settings."""
        shown = f"rubrics {fingerprint(*(rubric(name) for name in self.rubrics))}" if self.rubrics else ""
        return "; ".join(part for part in (self.panel.identity, shown, self.settings) if part)

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> Scores: ...

    def submit(self, samples: Sequence[Sample]) -> Future[Scores]:
        """Score in the background. Calls may finish in any order."""
        return self.panel.threads.submit(self, samples)

    def close(self) -> None:
        """Stop the threads, and close the client's connections."""
        if self._model is not None:
            self._model.close()

    def load(self, device: torch.device | str) -> Panel:
        """Open a panel with its own client. Raises ValueError as ``JudgeModel.open`` does."""
        return self._panel(self.judge.open(device=device))

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Return the reward with an open client; ``clients`` shares one client among the rewards with the same judge section."""
        clients = JudgeClients(device) if clients is None else clients
        return keep(self.with_model(self._panel(clients.open(self.judge))))

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield a message for repeated answers at temperature 0, and for each problem of the judge's section."""
        yield from super().problems(path, prefix, run)
        if self.n_evals > 1 and self.temperature == 0:
            same = f"{self.n_evals} answers at temperature 0 are all the same"
            yield f"{path}.n_evals: {same}; set a temperature above 0, for example 0.7, or n_evals 1"
        yield from self.judge.problems(f"{path}.judge")

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Yield the changeable paths of the reward and of its judge's section."""
        yield from super().changeable_paths(path)
        for key in self.judge.changeable:
            yield f"{path}.judge.{key}"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the judge's model if it runs in this process."""
        yield from self.judge.loaded_models()

    def variables(self) -> Iterator[tuple[str, str]]:
        """Yield the environment variables of the judge's API key."""
        for variable in self.judge.variables():
            yield variable, self.judge.description

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Yield the environment variables of the API keys that the judge's client sends, each with the URL of the server."""
        yield from self.judge.keys_sent()

    def _panel(self, client: JudgeClient) -> Panel:
        return Panel(client, repeats=self.n_evals, temperature=self.temperature, seed=self.seed)
