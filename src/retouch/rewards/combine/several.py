"""The reward of kind ``several``: rewards by name, whose columns are combined into one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_serializer

from retouch.protocols import Reward
from retouch.rewards.base import RewardSection, unchanged
from retouch.rewards.facts import RunFacts, TaskFacts
from retouch.rewards.parts import PARTS
from retouch.types import Column

if TYPE_CHECKING:
    import torch

    from retouch.rewards.vlm.base import JudgeClients

Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")]
_COMMON = ("combine", "max_missing")


class SeveralRewards(RewardSection):
    """Several rewards, which score in parallel; the column ``alignment`` of the reward ``judge`` is named ``judge/alignment``."""

    kind: Literal["several"] = "several"
    rewards: Annotated[dict[Name, Annotated[RewardSection, PARTS]], Field(min_length=1)]
    """The rewards, by names of your choice."""

    @field_serializer("rewards")
    def _parts(self, rewards: dict[str, RewardSection]) -> dict[str, Any]:
        """Without the keys that belong to all of them together."""
        documents = {name: PARTS.document(part) for name, part in rewards.items()}
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
        for inner, own, section in self.parts(path):
            yield from section.problems(inner, own, run)

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Those of the rewards."""
        for inner, _, section in self.parts(path):
            yield from section.task_problems(inner, tasks)

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
        return CompositeReward({name: part.build(device=device, clients=clients, keep=keep) for name, part in self.rewards.items()})
