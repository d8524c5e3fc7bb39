"""The playground's judges: exact judges of edits and of scenes, which know the scene of a task and compare pixels cell by cell, and
a judge of the style of signs. ``measuring`` computes the scores."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores
from retouch_worlds.playground.scenes import KINDS


class PlaygroundReward(RewardSection):
    """The playground's exact judge of edits: it compares the image with ``scene`` and ``edits`` in the task's ``meta``.

    For each cell, d_out is the distance of the image to the expected cell, d_src the distance of the source image to the expected
    cell, d_kept the distance of the image to the source's cell, and d_near the distance of the image to the nearest template
    (empty, or one of the 18 objects) on the background that fits the image best. keep(d) = 1 - clip((d - 0.03) / 0.09, 0, 1).
    ``IF``, instruction following, 0 to 10: 10 x the mean over the edits of the mean over their cells of clip((1 - d_out / d_src -
    0.1) / 0.8, 0, 1); 0 for the unchanged source. ``IP``, identity preservation, 0 to 10: 10 x the weighted mean of keep(d_kept)
    over the cells that no edit touches; cells with an object have weight 3, empty cells 1; 10 for the unchanged source. ``PQ``,
    image quality, 0 to 10, independent of the instruction: 10 x the mean of keep(d_near) over all cells; 0 if no cell shows an
    object (its nearest template is an object, and keep is above 0). ``overall``, 0 to 10: sqrt(min(IF, IP) x PQ). ``exact``: 1 if
    the background and the nearest template of every cell are those of the target and PQ is at least 7, else 0. ``success/<kind>``,
    diagnostics: the share of the task's edits of this kind that are done (the nearest templates of all their cells are those of the
    target); NaN if the task has no such edit.

    Example::

        >>> from retouch_worlds.data import PlaygroundData
        >>> (task,) = PlaygroundData(count=1, complexity=[1]).tasks()
        >>> scores = retouch.score(retouch.rewards.Playground(), task.target, source=task.images, meta=task.meta)
        >>> scores["overall"]
        10.0
    """

    kind: Literal["playground"] = "playground"

    columns: ClassVar[Mapping[str, Column]] = {
        "IF": Column(0.0, 10.0),
        "IP": Column(0.0, 10.0),
        "PQ": Column(0.0, 10.0),
        "overall": Column(0.0, 10.0),
        "exact": Column(0.0, 1.0),
        **{f"success/{kind}": Column(0.0, 1.0, diagnostic=True) for kind in KINDS},
    }

    data_kinds = ("playground", "playground-indirect")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image, or with an image that is not 24 x 24, gets the minimum.
        Raises ValueError if a task is not a task of the playground."""
        from retouch_worlds.measuring import edit_scores

        return edit_scores(samples, self.columns)


class SceneReward(RewardSection):
    """The playground's exact judge of text-to-image scenes: it compares the image with the ``scene`` in the task's ``meta``, and
    never reads a writer's prompt.

    The background of the image is the background that fits it best. For each cell that must contain an object, d_object is the
    distance of the image to this object on the image's background; keep(d) = 1 - clip((d - 0.03) / 0.09, 0, 1). ``alignment``, 0 to
    10: 10 x (3 x sum of keep(d_object) + ground) / (3 x (requested objects + extra objects) + 1), where ground is 1 on the
    requested background, else 0, and an extra object is an object in a cell that must be empty. ``quality``, 0 to 10, independent
    of the request: 10 x the mean over the cells of keep of the distance to the nearest template; 0 if no cell shows an object.
    ``overall``, 0 to 10: sqrt(alignment x quality). ``exact``: 1 if the background and the nearest template of every cell are those
    of the scene and quality is at least 7, else 0. Diagnostics: ``shown``, the share of the requested objects that are in their
    cell; ``ground``, as above; ``extra``, the number of extra objects.

    Example::

        >>> from retouch_worlds.data import TextToImageData
        >>> (task,) = TextToImageData(count=1, complexity=[1]).tasks()
        >>> retouch.score(retouch.rewards.Scene(), task.target, meta=task.meta)["exact"]
        1.0
    """

    kind: Literal["playground-scenes"] = "playground-scenes"

    columns: ClassVar[Mapping[str, Column]] = {
        "alignment": Column(0.0, 10.0),
        "quality": Column(0.0, 10.0),
        "overall": Column(0.0, 10.0),
        "exact": Column(0.0, 1.0),
        "shown": Column(0.0, 1.0, diagnostic=True),
        "ground": Column(0.0, 1.0, diagnostic=True),
        "extra": Column(0.0, 9.0, diagnostic=True, higher_is_better=False),
    }
    data_kinds = ("playground-scenes",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image, or with an image that is not 24 x 24, gets the minimum, and
        NaN for ``extra``. Raises ValueError if a task has no scene of the playground."""
        from retouch_worlds.measuring import scene_scores

        return scene_scores(samples, self.columns)


class SignReward(RewardSection):
    """The playground's judge of signs: whether the image, in the white part of the mask, has the ink and paper colours of the
    ``reference``.

    ``paper``, 0 to 1: 1 - clip((d - 16) / 64, 0, 1), where d is the distance between the two paper colours; a paper colour is the
    median of red, green and blue. ``ink``, 0 to 1: the same formula for the two ink colours; an ink colour is the mean of the 8
    pixels that are farthest from the paper colour. ``ink`` is 0 if the image's ink is less than 60 away from its paper, because
    then nothing is written. ``style``: the mean of both. The edges of letters are blurred, differently in every word, which changes
    an ink colour by less than 16.

    Example::

        >>> from retouch_worlds.data import WordData
        >>> (task,) = WordData(count=1, style_from_reference=True).tasks()
        >>> scores = retouch.score(retouch.rewards.Sign(), task.target, mask=task.mask, reference=task.reference)
        >>> scores["style"]
        1.0
    """

    kind: Literal["playground-signs"] = "playground-signs"

    columns: ClassVar[Mapping[str, Column]] = {"style": Column(0.0, 1.0), "paper": Column(0.0, 1.0), "ink": Column(0.0, 1.0)}
    data_kinds = ("playground-words",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image, or with an image of another size than the mask, scores 0.
        Raises ValueError if a task has no mask, an empty mask, or no reference."""
        from retouch_worlds.measuring import sign_scores

        return sign_scores(samples)
