"""GenEval (arXiv 2310.11513): objects, counts, colours and positions, checked with an object detector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from retouch.config.section import Share
from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_prompts
from retouch.rewards.base import PathText, RewardSection
from retouch.rewards.scorers.geneval import GenEvalReward, requirements
from retouch.types import Column, Task
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite
from retouch_judge.models import JudgeModel

_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


class GenEvalSuite(RowSuite):
    """GenEval: 553 prompts in six tasks."""

    detector: PathText = "google/owlv2-base-patch16-ensemble"
    """Folder of an OWL-ViT, OWLv2 or Grounding DINO model, or its id in the Hugging Face cache."""
    clip: PathText = "openai/clip-vit-large-patch14"
    """The CLIP model that classifies colours."""
    threshold: Share = 0.3
    """Confidence above which an object counts as detected."""
    counting_threshold: Share = 0.4
    """Confidence above which an object counts as detected in the task ``counting``."""

    name: ClassVar[str] = "geneval"
    title: ClassVar[str] = "GenEval"
    source: ClassVar[str] = "https://github.com/djghosh13/geneval"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[int] = 553
    protocol: ClassVar[str] = (
        "Four images of each prompt. An image is correct if every required object is detected, in the required number, colour and "
        "position, and no excluded count is reached. The share of correct images is taken in each of the six tasks; the headline "
        "is the mean of the tasks."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Objects are detected by an open-vocabulary detector of transformers; the published one is Mask2Former of mmdetection on "
        "the 80 classes of COCO. Their agreement was not measured, so the numbers are not comparable with published ones.",
        "Colours are classified on crops of the boxes; the published script replaces the pixels outside the object by grey.",
        "The threshold for counting is 0.4, because open-vocabulary detectors are less confident; the published one is 0.9.",
    )
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = GenEvalReward.columns
    headline_column: ClassVar[str] = "correct"
    average = "categories"
    layout: ClassVar[str] = "give prompts/evaluation_metadata.jsonl of the repository djghosh13/geneval"

    def rows(self, data: Path) -> Rows:
        """Read the lines of the file."""
        return read_prompts(data / "evaluation_metadata.jsonl" if data.is_dir() else data, name="geneval")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with its tag as the category. Raises ValueError for requirements that GenEval does not have."""
        tag = row.meta.get("tag")
        if tag not in _TAGS:
            raise ValueError(f"'tag': {tag!r} is not one of {', '.join(_TAGS)}")
        fields = {key: row.meta[key] for key in ("tag", "include", "exclude") if key in row.meta}
        requirements(Task(row.id, row.instruction, meta=fields))
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, category=str(tag), fields=fields)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return the detector and CLIP; ``judge`` is ignored."""
        return GenEvalReward(
            detector=self.detector, clip=self.clip, threshold=self.threshold, counting_threshold=self.counting_threshold
        )
