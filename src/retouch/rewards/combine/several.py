"""The reward of kind ``several``: named rewards whose columns are combined into one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_serializer

from retouch.config.kinds import Kinds
from retouch.protocols import DifferentiableReward, Reward
from retouch.rewards.base import RewardSection, unchanged
from retouch.rewards.facts import RunFacts, TaskFacts
from retouch.rewards.parts import SINGLE
from retouch.types import Column, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from retouch.rewards.vlm.base import JudgeClients

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
_COMMON = ("combine", "max_missing")
PARTS_OF_SEVERAL = Kinds("reward", {**SINGLE, "calibrated": "retouch.rewards.combine.calibrated:CalibratedReward"}, with_wings=True)


class SeveralRewards(RewardSection):
    """Several rewards, which score in parallel; the column ``alignment`` of the reward ``judge`` is named ``judge/alignment``.

    ``draft`` and ``refl`` differentiate the weighted sum of the rewards, if all of them are differentiable.
    """

    kind: Literal["several"] = "several"
    rewards: Annotated[dict[Name, Annotated[RewardSection, PARTS_OF_SEVERAL]], Field(min_length=1)]
    """The rewards, under names of your choice."""

    @field_serializer("rewards")
    def _parts(self, rewards: dict[str, RewardSection]) -> dict[str, Any]:
        """The rewards as JSON, without the keys ``combine`` and ``max_missing``, which belong to all rewards together."""
        documents = {name: PARTS_OF_SEVERAL.document(part) for name, part in rewards.items()}
        for document in documents.values():
            for key in _COMMON:
                document.pop(key)
        return documents

    def known_columns(self) -> Mapping[str, Column] | None:
        """The columns of all rewards by full name; None if the columns of a reward are not known yet."""
        columns: dict[str, Column] = {}
        for name, part in self.rewards.items():
            own = part.known_columns()
            if own is None:
                return None
            columns |= {f"{name}/{column}": range_ for column, range_ in own.items()}
        return columns

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, RewardSection]]:
        """Yield each reward, with its name as the prefix of its columns."""
        for name, part in self.rewards.items():
            for inner, _, section in part.parts(f"{path}.rewards.{name}"):
                yield inner, f"{name}/", section

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield the problems of the rewards, and keys of a single reward that belong to all rewards together."""
        for name, part in self.rewards.items():
            if part.model_fields_set & set(_COMMON):
                yield (
                    f"{path}.rewards.{name}: combine and max_missing belong to all rewards together; move them next to `rewards`"
                )
            yield from part.problems(f"{path}.rewards.{name}", f"{name}/", run)

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Yield the task problems of the rewards."""
        for name, part in self.rewards.items():
            yield from part.task_problems(f"{path}.rewards.{name}", tasks)

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Yield the paths of the rewards that may differ when a run is resumed."""
        for name, part in self.rewards.items():
            yield from part.changeable_paths(f"{path}.rewards.{name}")

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Build a ``CompositeReward``; ``keep`` is applied to each of its rewards."""
        from retouch.rewards.combine.composite import CompositeReward
        from retouch.rewards.vlm.base import JudgeClients

        clients = JudgeClients(device) if clients is None else clients
        parts = {name: part.build(device=device, clients=clients, keep=keep) for name, part in self.rewards.items()}
        return CompositeReward(parts, combine=self.combine)

    def require_gradient(self) -> None:
        """Raise ValueError if a reward has no gradient in the image, or if ``combine`` is not a weighted sum of differentiable
        columns."""
        from retouch.rewards.combine.gradients import gradient_weights

        for name, part in self.rewards.items():
            if not isinstance(part, DifferentiableReward):
                raise ValueError(f"rewards.{name}: {part.name} has no gradient in the image; use it only in `reward`")
            if part.model_fields_set & set(_COMMON):
                raise ValueError(f"rewards.{name}: combine and max_missing belong to all rewards together; move them up")
        gradient_weights(self.rewards, self.combine)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The weighted sum of the rewards' scores of ``images``, with gradient (``retouch.protocols.DifferentiableReward``)."""
        from retouch.rewards.combine.gradients import weighted_scores

        return weighted_scores(self.rewards, self.combine, images, tasks)
