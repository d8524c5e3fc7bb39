"""The data sources that a recipe can select, one row per kind, and reading a path by the first source that recognises it."""

from pathlib import Path

from retouch.config.section import Kinds
from retouch.data.base import DataSource
from retouch.data.checks import find_problems
from retouch.data.images import MAX_PIXELS
from retouch.data.rows import Problem, Rows

DATA = Kinds(
    "data",
    {
        "folder": "retouch.data.sources.folder:FolderData",
        "hub": "retouch.data.sources.hub:HubData",
        "stream": "retouch.data.sources.stream:StreamData",
        "prompts": "retouch.data.sources.folder:PromptData",
        "table": "retouch.data.sources.hub:TableData",
        "iterable": "retouch.data.sources.stream:IterableData",
    },
    with_wings=True,
)


def check(source: str | Path | Rows, *, max_pixels: int = MAX_PIXELS, resize: tuple[int, int] | None = None) -> list[Problem]:
    """The errors of a data set and notes on how it is read: first those of the file, then those of each row.

    ``source``: rows, or a path for ``read_path``. ``resize``: the (width, height) that a run would give the images. Errors: a line
    that is not JSON (or CSV, or UTF-8), a missing instruction, a repeated id, an image that is missing, damaged, too large, of an
    unsupported format or outside the folder, a mask whose size differs from its image, or that resizing would crop away. Notes: a
    byte-order mark, CRLF, keys that look mistyped, images that are not RGB or that EXIF rotates, a mask that is empty or not black
    and white, a target whose aspect ratio differs from its source.
    """
    if isinstance(source, str | Path):
        try:
            source = read_path(source)
        except ValueError as error:
            return [Problem(str(source), 0, str(error))]
    return [
        *source.problems,
        *(problem for _, found in find_problems(source, max_pixels=max_pixels, resize=resize) for problem in found),
    ]


def read_path(path: str | Path) -> Rows:
    """The rows of a file or folder. They are read by the first data source that recognises its layout, else by ``datasets``.

    Raises ValueError if ``path`` does not exist or cannot be read.
    """
    where = Path(path)
    if not where.exists():
        raise ValueError(f"{path}: no such file or folder")
    from retouch.data.sources.hub import read_hub

    for source in DATA.classes():
        if issubclass(source, DataSource) and (rows := source.rows_at(where)) is not None:
            return rows
    return read_hub(where)
