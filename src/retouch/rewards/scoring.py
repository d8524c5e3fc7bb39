"""One picture, one call: a reward's columns without making a task of it. For many, call the reward itself with samples."""

from collections.abc import Mapping, Sequence

from PIL.Image import Image

from retouch.protocols import Reward
from retouch.rewards.judging import scores_of
from retouch.types import Json, Sample, Task


def score(
    reward: Reward,
    image: Image,
    *,
    instruction: str = "",
    source: Image | Sequence[Image] = (),
    mask: Image | None = None,
    reference: Image | None = None,
    target: Image | None = None,
    text: str | None = None,
    written: str | None = None,
    meta: Mapping[str, Json] | None = None,
) -> dict[str, float]:
    """The reward's columns for ``image``; NaN where it could not be judged, or a diagnostic does not apply.

    ``source``: the picture or pictures that were edited. ``mask``: white where to change. ``text``: what should stand in the
    picture. ``written``: what a policy wrote for it, for rewards of text. ValueError where the reward needs what is not given, or
    returns something else than it declares.

    Example: ``score(ClipReward(), image, instruction="a red barn")["similarity"]``
    """
    images = (source,) if isinstance(source, Image) else tuple(source)
    task = Task("picture", instruction, images, mask, reference, target, text, meta=meta or {})
    return {name: column.item() for name, column in scores_of(reward, [Sample(task, image, written)]).items()}
