"""`retouch sample`: use a policy as its end user would."""

from pathlib import Path

from retouch.data.images import load_image, load_mask
from retouch.runs.completions import texts
from retouch.runs.opening import open_target
from retouch.types import Batch, Task


def sample_target(target: str, *, instruction: str, image: Path | None, mask: Path | None, out: Path, seed: int) -> str | None:
    """Make one picture from the instruction and the source picture, and write it to ``out``. Returns what a writer wrote for it.

    ValueError where a picture cannot be read, or where nothing usable was made.
    """
    if not instruction.strip():
        raise ValueError("--instruction is empty; say what the picture should become")
    images = () if image is None else (load_image(image),)
    task = Task(id=str(out), instruction=instruction, images=images, mask=None if mask is None else load_mask(mask))
    parts, _ = open_target(target)
    policy = parts.policy(parts.recipe.rollout)
    batch = Batch(seed=seed, step=0, tasks=(task,), group_ids=(0,), group=(0,), slot=(0,))
    acted = policy.sample(batch)
    (made,), (written,) = parts.users_renderer()([task], acted), texts(acted)
    parts.judge.close()
    if made is None and written is None:
        raise ValueError("the policy made latents that are not finite; train it less far, or take an earlier checkpoint")
    if made is None:
        raise ValueError(f"nothing can be drawn of what the policy wrote: {written!r}")
    out.parent.mkdir(parents=True, exist_ok=True)
    made.save(out)
    return written
