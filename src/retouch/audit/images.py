"""Where the pictures that a run judged still lie: under ``pictures/``, where it kept them all, else some under ``samples/``."""

from functools import cached_property
from pathlib import Path

from PIL import Image

from retouch.audit.opening import Scored
from retouch.records.folder import RunFolder
from retouch.rewards.ledger.kept_images import KeptImages, read_image

_SETS = {"group": "train", "heldout": "heldout"}


class Shown:
    """The pictures of a run's folder."""

    def __init__(self, run: Path) -> None:
        self._folder = RunFolder(run)
        self._kept = KeptImages(run)

    def path(self, sample: Scored) -> Path | None:
        """The file of the sample's picture; None where there is none any more."""
        if not sample.picture:
            return None
        kept = self._kept.path(sample.picture)
        return kept if kept.exists() else self._sampled.get(sample.place)

    def image(self, sample: Scored) -> Image.Image | None:
        """The very picture that was judged; None where it is not there, or another one stands in its place."""
        path = self.path(sample)
        return None if path is None else read_image(path, sample.picture)

    @cached_property
    def _sampled(self) -> dict[tuple[str, int, int, int], Path]:
        """The pictures that were kept for people to look at, by where they stood."""
        found = {}
        for step in self._folder.sample_steps():
            for line in self._folder.read_samples(step):
                if line["image"] is not None:
                    place = _SETS[line["set"]], step, line["group"], line["slot"]
                    found[place] = self._folder.samples(step) / line["image"]
        return found
