"""Shows a run in a notebook: the curves and images of its report, without a server."""

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
    """A page about a run. A notebook shows it in a frame of ``height`` px, so that its style and script do not affect the notebook.

    ``html``: the complete page, which loads no other file.
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
    """Show the current reward, evaluations, and images before and after training of a run, also while it trains.

    ``run``: the folder of the run, a ``Trainer``, or a loaded run. ``everything``: also show all metrics, times and the recipe, as
    in ``report.html``. ``height``: px, at least 1. Raises ValueError if ``run`` is not the folder of a run.

    Example::

        >>> page = retouch.view("runs/quickstart")
        >>> "Before and after" in page.html
        True
    """
    if height < 1:
        raise ValueError(f"height {height}: must be above 0")
    folder = Path(run) if isinstance(run, str | Path) else run.folder
    return RunView(run_page(folder, brief=not everything), height)
