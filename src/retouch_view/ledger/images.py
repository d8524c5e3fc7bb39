"""Find the images that a run scored: in ``pictures/`` if the run stored all images, otherwise some of them in ``samples/``."""

from functools import cached_property
from pathlib import Path

from PIL import Image

from retouch.records.files import inside
from retouch.records.folder import RunFolder
from retouch.rewards.ledger.database import ImageStore, read_image
from retouch_view.ledger.ledger_view import LedgerSample

_SETS = {"group": "train", "heldout": "heldout"}


class RunImages:
    """The images in the folder of a run."""

    def __init__(self, run: Path) -> None:
        self._folder = RunFolder(run)
        self._kept = ImageStore(run)

    def path(self, sample: LedgerSample) -> Path | None:
        """The file of the sample's image; None if there is none."""
        if not sample.image:
            return None
        kept = self._kept.path(sample.image)
        return kept if kept.exists() else self._sampled.get(sample.place)

    def image(self, sample: LedgerSample) -> Image.Image | None:
        """The image that was scored; None if its file is missing or contains another image."""
        path = self.path(sample)
        return None if path is None else read_image(path, sample.image)

    @cached_property
    def _sampled(self) -> dict[tuple[str, int, int, int], Path]:
        """The images that the run stored as examples, by their position in the run."""
        found = {}
        for step in self._folder.sample_steps():
            for line in self._folder.read_samples(step):
                if line["image"] is not None:
                    place = _SETS[line["set"]], step, line["group"], line["slot"]
                    found[place] = inside(self._folder.samples(step), line["image"])
        return found
