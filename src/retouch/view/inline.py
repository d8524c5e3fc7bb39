"""A run in a notebook: the curves and images of its report, in place and without a server."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

from retouch.records.files import write_atomic
from retouch.report.page import run_page


class HasFolder(Protocol):
    """A run that knows its folder: a ``Trainer``, or the result of ``load_run``."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...


@dataclass(frozen=True, slots=True)
class RunView:
    """A page about a run. A notebook shows it in a frame of ``height`` px, in which the page's style and script stay.

    ``html``: the whole page, one file that loads nothing.
    """

    html: str
    height: int

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" style="width:100%;height:{self.height}px;border:0" title="run" '
            f'srcdoc="{escape(self.html, quote=True)}"></iframe>'
        )

    def __repr__(self) -> str:
        return f"RunView({len(self.html)} characters of HTML; save it with .save(FILE))"

    def save(self, file: str | Path) -> Path:
        """Write the page to a file, and return its path."""
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, self.html.encode())
        return path


def view(run: str | Path | HasFolder, *, everything: bool = False, height: int = 700) -> RunView:
    """A run's reward, evaluations, and images before and after, as they are now; also while it trains.

    ``run``: the run's folder, a ``Trainer``, or a loaded run. ``everything``: also all metrics, times and the recipe, as in
    ``report.html``. ``height``: px. Raises ValueError if this is not the folder of a run.

    Example::

        >>> page = retouch.view("runs/quickstart")
        >>> "Before and after" in page.html
        True
    """
    if height < 1:
        raise ValueError(f"height {height}: must be above 0")
    folder = Path(run) if isinstance(run, str | Path) else run.folder
    return RunView(run_page(folder, brief=not everything), height)
