"""Sections of a recipe about the data: where the tasks come from."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from retouch.config.section import Count, NonNegative, Pixels, Positive, Section, Share
from retouch.data.sources.complex_edit import ID, levels


def _equal_weights(value: Any) -> Any:
    """A list of complexities is short for equal weights."""
    if isinstance(value, list) and all(isinstance(entry, int) for entry in value) and len(set(value)) == len(value):
        return {str(entry): 1.0 for entry in value}
    return value


def _levels(text: str) -> str:
    levels(text)
    return text


Complexity: TypeAlias = Annotated[int, Field(strict=False, ge=1, le=4)]
Mixture: TypeAlias = Annotated[dict[Complexity, NonNegative], Field(min_length=1), BeforeValidator(_equal_weights)]
Levels: TypeAlias = Annotated[str, AfterValidator(_levels)]


class DataSection(Section):
    """What all data have in common."""

    allow_test_sets: bool = False
    """Train even on data known to be a test set; the run records it."""


class DrawnData(DataSection):
    """What all data that are drawn from a seed have in common."""

    count: Count
    """Tasks in the set."""
    seed: int = 0
    """What the tasks are drawn from."""
    split: Literal["train", "validation", "test"] = "train"
    """Which of the three disjoint sets of scenes, instructions or words to draw from."""


class PlaygroundData(DrawnData):
    """Scenes and edits drawn from a seed."""

    kind: Literal["playground"]
    complexity: Mixture
    """Numbers of edits in one instruction, 1 to 4: a list, or a map from number to weight."""
    filler: Share = 0.0
    """Share of instructions with words in them that ask for nothing."""
    vain: Share = 0.0
    """Share of instructions that also ask for edits of things that are not there; held-out tasks have none."""
    unfinished: Share = Field(default=0.0, exclude_if=lambda share: share == 0)
    """Share of the tasks with several edits whose target lacks one of them, as demonstrations that a model made do; held-out tasks
    have none."""
    thought: bool = Field(default=False, exclude_if=lambda thought: not thought)
    """Each task also has its edits in plain words as a thought, for a model that thinks before it draws."""


class IndirectPlaygroundData(PlaygroundData):
    """The playground's scenes and edits, with things named only as far as they must be for who sees the picture: for a writer that
    does, and says to the editor which they are. Each task has such a ``completion``."""

    kind: Literal["playground-indirect"]  # type: ignore[assignment]
    filler: Literal[0] = 0
    """There is none in these instructions."""
    vain: Literal[0] = 0
    """Nor are there any of these."""
    unfinished: Literal[0] = Field(default=0, exclude=True)
    """Nor of these: a writer is shown words."""
    lazy: Share = 0.0
    """Share of the tasks with several edits whose completion says nothing; held-out tasks have none."""


class PaintingData(DrawnData):
    """Scenes of the playground, asked for in words that its painter does not know: for a writer of prompts. Each task has such a
    prompt as its ``completion``."""

    kind: Literal["playground-paintings"]
    complexity: Mixture
    """Numbers of things in a scene, 1 to 4: a list, or a map from number to weight."""
    lazy: Share = 0.0
    """Share of tasks of several things whose completion stops after the first or the second; held-out tasks have none."""


class WordData(DrawnData):
    """Words to paint on an empty sign, in the style of the sign beside it or of a reference. ``ocr`` reads them, and
    ``playground-signs`` looks at the style."""

    kind: Literal["playground-words"]
    slips: Share = 0.0
    """Share of letters that the targets have wrong; held-out tasks have none."""
    apart: bool = Field(default=False, exclude_if=lambda apart: not apart)
    """The picture's signs are in another ink and on another paper than what is asked for, which the reference alone shows."""


class PicturedData(DataSection):
    """What all data with pictures in files have in common."""

    size: Pixels | None = None
    """Height and width in pixels that every picture is resized to; null takes the model's."""
    held_out: Share | Count = 0.1
    """Kept for evaluation: a share of the source pictures, or (a whole number) at least so many rows, whole pictures either way."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """What to do about a row that cannot be used: stop before training, or go on without it and say so."""
    limit: Count | None = None
    """Use so many rows, drawn by the recipe's seed; null uses all."""


class FolderData(PicturedData):
    """A folder of pictures with a ``metadata.jsonl``, as in the Hugging Face imagefolder convention."""

    kind: Literal["folder"]
    path: str
    """The folder."""
    columns: dict[str, str] = Field(default={})
    """Our names (``instruction``, ``target``, ...) to the names in the file, where they differ."""


class HubData(PicturedData):
    """A Hugging Face data set by id or path."""

    kind: Literal["hub"]
    path: str
    """Id or folder of the data set."""
    config: str | None = None
    """Which of its configurations; null where there is one."""
    revision: str | None = None
    """Commit or tag; null takes the newest."""
    split: str = "train"
    """Which of its splits."""
    columns: dict[str, str]
    """Our names (``instruction``, ``image``, ``target``, ...) to the data set's."""


class ComplexEditData(PicturedData):
    """Complex-Edit: instructions of 1 to 8 edits each. It is a benchmark, so training on it needs ``allow_test_sets``."""

    kind: Literal["complex-edit"]
    path: str = ID
    """Id or folder of the data set."""
    revision: str | None = None
    """Commit or tag; null takes the newest."""
    split: Literal["test_real", "test_syn"] = "test_real"
    """Photographs, or pictures that a model made."""
    complexity: Levels
    """Edits in one instruction, 1 to 8: "8", "1-8" or "1,3,5". Pictures are split before they are taken at several levels."""


class TripletData(PicturedData):
    """Words to paint into a masked part of a picture, in the style of a reference (``self_bench.txt`` and its pictures). The known
    set of this layout is a benchmark, so training on it needs ``allow_test_sets``."""

    kind: Literal["triplets"]
    path: str
    """The folder."""
    reference: Literal["own", "other"] = "other"
    """Whose style crop an item is shown: its own shows the letters that are to be painted."""


class PromptData(DataSection):
    """A text file with one instruction a line and no pictures."""

    kind: Literal["prompts"]
    path: str
    """The file; those that come with the package's recipes are ``recipes/...`` from anywhere."""
    held_out: Share | Count = 0.1
    """Share of the prompts kept for evaluation, or (a whole number) how many."""
    limit: Count | None = None
    """Use so many prompts, drawn by the recipe's seed; null uses all."""


Coefficients: TypeAlias = tuple[Positive, ...]


class TokenData(DataSection):
    """Edits as image tokens, in EARL's layout (``retouch data tokenize`` makes it): for policies that write pictures as tokens."""

    kind: Literal["tokens"]
    lists: Annotated[tuple[str, ...], Field(min_length=1)]
    """Lists of feature files (``tokenized_datalist.json``), or the folders that have them."""
    coefficients: Coefficients = ()
    """How often the rows of each list come in a pass: whole copies, and of the rest of it rows drawn by the recipe's seed. An empty
    list makes each as large as the largest."""
    validation_lists: tuple[str, ...] = ()
    """Lists to be judged on; rows that train from the same source pictures are left out. Without any, some are held out."""
    validation_coefficients: Coefficients = ()
    """The same for these."""
    trusted: bool = False
    """Open ``.pth`` features too, whose maker you trust; only torch's restricted loader reads them."""
    held_out: Share | Count = 0.1
    """Kept for evaluation where there are no ``validation_lists``: a share of the source pictures, or (a whole number) at least so
    many rows."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """What to do about a file that cannot be used: stop before training, or go on without it and say so."""
    limit: Count | None = None
    """Use so many rows of the mixture, drawn by the recipe's seed; null uses all."""


Data: TypeAlias = Annotated[
    PlaygroundData
    | IndirectPlaygroundData
    | PaintingData
    | WordData
    | FolderData
    | HubData
    | ComplexEditData
    | TripletData
    | PromptData
    | TokenData,
    Field(discriminator="kind"),
]
