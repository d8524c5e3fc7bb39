"""What image models of each kind are given to work with: known from a recipe alone, before anything is loaded."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """``pictures``: how many source pictures of a task, at least and at most. ``mask``: and what of the first is to change.

    ``responses``: it reads a writer's response to the task. ``guidance``: guidance is an input of it (guidance distillation).
    """

    pictures: tuple[int, int]
    mask: bool = False
    responses: bool = False
    guidance: bool = False

    def __str__(self) -> str:
        least, most = self.pictures
        pictures = "no picture" if most == 0 else "one picture" if most == 1 else f"{least} to {most} pictures"
        return f"{pictures} and a mask" if self.mask else pictures


TAKES = {
    "playground": Takes(pictures=(1, 1), responses=True),
    "playground-painter": Takes(pictures=(0, 0)),
    "playground-words": Takes(pictures=(1, 1), mask=True, guidance=True),
    "qwen-image": Takes(pictures=(0, 0)),
    "qwen-image-edit": Takes(pictures=(1, 1), responses=True),
    "qwen-image-edit-plus": Takes(pictures=(1, 8), responses=True),
    "sd3": Takes(pictures=(0, 0)),
    "z-image": Takes(pictures=(0, 0)),
    "flux": Takes(pictures=(0, 0), guidance=True),
    "flux-fill": Takes(pictures=(1, 1), mask=True, guidance=True),
    "flux-kontext": Takes(pictures=(1, 1), guidance=True),
    "emu3": Takes(pictures=(1, 1)),
    "playground-emu3": Takes(pictures=(1, 1)),
}
EDITORS = tuple(kind for kind, takes in TAKES.items() if takes.responses)


def takes_of(kind: str) -> Takes | None:
    """What models of the kind take; None for an imported one, which only itself knows."""
    return TAKES.get(kind)
