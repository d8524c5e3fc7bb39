"""The reward of kind ``several``: rewards by name, whose columns are combined into one number."""

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
PARTS_OF_SEVERAL = Kinds("reward", {**SINGLE, "calibrated": "retouch.rewards.combine.calibrated:CalibratedReward"})


class SeveralRewards(RewardSection):
    """Several rewards, which score in parallel; the column ``alignment`` of the reward ``judge`` is named ``judge/alignment``.

    ``draft`` and ``refl`` differentiate the weighted sum of several rewards that all have a gradient.
    """

    kind: Literal["several"] = "several"
    rewards: Annotated[dict[Name, Annotated[RewardSection, PARTS_OF_SEVERAL]], Field(min_length=1)]
    """The rewards, by names of your choice."""

    @field_serializer("rewards")
    def _parts(self, rewards: dict[str, RewardSection]) -> dict[str, Any]:
        """Without the keys that belong to all of them together."""
        documents = {name: PARTS_OF_SEVERAL.document(part) for name, part in rewards.items()}
        for document in documents.values():
            for key in _COMMON:
                document.pop(key)
        return documents

    def known_columns(self) -> Mapping[str, Column] | None:
        """All columns under their full names; None if one of the rewards does not know its own."""
        columns: dict[str, Column] = {}
        for name, part in self.rewards.items():
            own = part.known_columns()
            if own is None:
                return None
            columns |= {f"{name}/{column}": range_ for column, range_ in own.items()}
        return columns

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, RewardSection]]:
        """The rewards."""
        for name, part in self.rewards.items():
            for inner, _, section in part.parts(f"{path}.rewards.{name}"):
                yield inner, f"{name}/", section

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Those of the rewards, and keys of one that belong to all."""
        for name, part in self.rewards.items():
            if part.model_fields_set & set(_COMMON):
                yield (
                    f"{path}.rewards.{name}: combine and max_missing belong to all rewards together; move them up, beside `rewards`"
                )
            yield from part.problems(f"{path}.rewards.{name}", f"{name}/", run)

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Those of the rewards."""
        for name, part in self.rewards.items():
            yield from part.task_problems(f"{path}.rewards.{name}", tasks)

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Those of the rewards."""
        for name, part in self.rewards.items():
            yield from part.changeable_paths(f"{path}.rewards.{name}")

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """A ``CompositeReward``; each of its rewards is put behind the ledger by itself."""
        from retouch.rewards.combine.composite import CompositeReward
        from retouch.rewards.vlm.base import JudgeClients

        clients = JudgeClients(device) if clients is None else clients
        parts = {name: part.build(device=device, clients=clients, keep=keep) for name, part in self.rewards.items()}
        return CompositeReward(parts, combine=self.combine)

    def require_gradient(self) -> None:
        """ValueError: a reward has no gradient in the image, or ``combine`` is no sum of scores that have one."""
        from retouch.rewards.combine.gradients import gradient_weights

        for name, part in self.rewards.items():
            if not isinstance(part, DifferentiableReward):
                raise ValueError(f"rewards.{name}: {part.name} has no gradient in the image; use it in `reward` alone")
            if part.model_fields_set & set(_COMMON):
                raise ValueError(f"rewards.{name}: combine and max_missing belong to all rewards together; move them up")
        gradient_weights(self.rewards, self.combine)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The weighted sum of the rewards' scores with gradient (``retouch.protocols.DifferentiableReward``), if all have one."""
        from retouch.rewards.combine.gradients import weighted_scores

        return weighted_scores(self.rewards, self.combine, images, tasks)
