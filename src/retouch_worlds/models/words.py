"""The recipe's section of the playground's model that renders words."""

from typing import Literal

from retouch.models.base import Size
from retouch.models.flux.family import FluxFillModel
from retouch_worlds.models.family import PlaygroundFamily


class PlaygroundWords(PlaygroundFamily, FluxFillModel):
    """The built-in tiny model that renders words on signs, for ``playground-words`` data."""

    kind: Literal["playground-words"] = "playground-words"  # type: ignore[assignment]

    shipped = "words"
    built_by = ("model that renders words", "retouch playground build --words")
    stated = ("max_sequence_length",)

    @property
    def planned_size(self) -> Size:
        from retouch_worlds.playground.world.words import HEIGHT, WIDTH

        return HEIGHT, WIDTH
