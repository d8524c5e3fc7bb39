"""Rewards for scripts: ``retouch.rewards.load`` makes one that scores lists of images."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from PIL.Image import Image

from retouch.config.imports import did_you_mean
from retouch.protocols import Reward
from retouch.rewards.base import close
from retouch.rewards.kinds import KINDS
from retouch.rewards.scoring import scores_of
from retouch.types import Column, Sample, Task


@dataclass(eq=False)
class LoadedReward(AbstractContextManager["LoadedReward"]):
    """A reward that is ready to score lists of images. Call ``close`` if it holds connections, or use it in a ``with`` block."""

    reward: Reward

    @property
    def columns(self) -> Mapping[str, Column]:
        """Each score that a call returns, with its range."""
        return self.reward.columns

    def close(self) -> None:
        """Close the connections and threads of the reward, if it has any."""
        close(self.reward)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(
        self,
        images: Sequence[Image],
        *,
        prompts: Sequence[str] | str | None = None,
        sources: Sequence[Image] | None = None,
        targets: Sequence[Image] | None = None,
        masks: Sequence[Image] | None = None,
        references: Sequence[Image] | None = None,
        texts: Sequence[str] | None = None,
        completions: Sequence[str] | None = None,
    ) -> dict[str, list[float]]:
        """The scores of the images: for each column one score per image, NaN if an image could not be judged.

        ``prompts``: one per image, or one for all images. ``sources``: the images that were edited. ``texts``: the text that each
        image should show. ``completions``: the texts that a policy wrote. Raises ValueError if the length of a list differs from
        the length of ``images``, or if the reward needs an argument that is not given.

        Example::

            >>> sorted(retouch.rewards.load("compressibility")([image]))
            ['compressibility']
        """
        count = len(images)
        for name, given in {"images": images, "sources": sources, "targets": targets, "references": references}.items():
            for row, image in enumerate(given or ()):
                mode = getattr(image, "mode", None)
                if not isinstance(mode, str):
                    raise ValueError(f"{name}[{row}] is of type {type(image).__name__}; give PIL images")
                if mode != "RGB":
                    raise ValueError(f"{name}[{row}] has mode {mode}, but rewards read RGB images; give image.convert('RGB')")
        prompts = [prompts] * count if isinstance(prompts, str) else prompts
        lists = {
            **{"prompts": prompts, "sources": sources, "targets": targets, "masks": masks},
            **{"references": references, "texts": texts, "completions": completions},
        }
        for name, values in lists.items():
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has length {len(values)}, but there are {count} images; give one per image")
        columns: list[Sequence[Any]] = [[None] * count if values is None else values for values in lists.values()]
        samples = []
        for row, (image, prompt, *given, text, completion) in enumerate(zip(images, *columns, strict=True)):
            source, target, mask, reference = given
            task = Task(str(row), prompt or "", () if source is None else (source,), mask, reference, target, text)
            samples.append(Sample(task, image, completion))
        return {name: column.tolist() for name, column in scores_of(self.reward, samples).items()}


def load(kind: str, *, device: Any = "cpu", **keys: Any) -> LoadedReward:
    """Load the reward of a kind, with its model. ``keys``: the keys of its section in a recipe.

    Raises ValueError for an unknown kind, a wrong key, or weights that are not on this machine.

    Example::

        >>> with retouch.rewards.load("share", channel="red") as reward:
        ...     reward([image])
        {'share': [1.0]}
    """
    section = KINDS.load(kind)
    if section is None:
        raise ValueError(f"there is no reward {kind!r}{did_you_mean(kind, KINDS)}; there are {', '.join(KINDS)}")
    made: Any = section(**({"kind": kind} if "kind" in section.model_fields else {}), **keys)
    return LoadedReward(made.build(device=device))
