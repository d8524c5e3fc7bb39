"""Trackers show metrics during a run: TensorBoard by default, W&B and Trackio on request.

Trackers only display metrics. Everything that the run itself needs is in its folder. A tracker's library is imported when the
tracker is opened.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL.Image import Image

from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.records.libraries import require_trackers

log = logging.getLogger("retouch")

TrackerName = Literal["tensorboard", "wandb", "trackio"]


class TensorBoard:
    """TensorBoard event files in the run's folder. Points of a killed run at or after ``first_step`` are hidden."""

    def __init__(self, folder: RunFolder, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard reads event files in the order of their names, which begin with the second of creation. It may read two files
        # of the same second in the wrong order; then the points of a killed run hide the points of the run that resumed it.
        while any(folder.tensorboard.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.05)
        self._writer = SummaryWriter(str(folder.tensorboard), purge_step=first_step)

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        for name, value in _measured(values).items():
            self._writer.add_scalar(name, value, global_step=step)

    def log_picture(self, title: str, draw: Callable[[], Image], step: int) -> None:
        self._writer.add_image(title, np.asarray(draw()), global_step=step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class _AccelerateTracker:
    _tracker: Any

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        self._tracker.log(_measured(values), step=step)

    def log_picture(self, title: str, draw: Callable[[], Image], step: int) -> None:
        self._tracker.log({title: import_module(self._tracker.name).Image(draw())}, step=step)

    def close(self) -> None:
        self._tracker.finish()


class Wandb(_AccelerateTracker):
    """A run on Weights & Biases, through accelerate's tracker.

    The run's id is WANDB_RUN_ID if it is set, otherwise ``tracker_id``; an existing run is continued. W&B ignores steps that it
    already has, which is correct here, because a resumed run computes the same numbers again.
    """

    def __init__(self, folder: RunFolder, *, project: str, recipe: Mapping[str, Any]) -> None:
        # W&B would take its server, to which it sends the key, from a file of the current folder, and run git there.
        for file in (place / name / "settings" for place in (Path(), folder.root) for name in ("wandb", ".wandb")):
            if file.exists():
                raise ValueError(f"{file} can send W&B's key to another server; move it to ~/.config/wandb/settings, or delete it")
        os.environ.setdefault("WANDB_DISABLE_GIT", "true")
        require_trackers(["wandb"])
        from accelerate import PartialState
        from accelerate.tracking import WandBTracker

        PartialState()  # accelerate's trackers log through it
        identity = tracker_id(folder.root, given=os.environ.get("WANDB_RUN_ID"))
        self._tracker = WandBTracker(project, name=folder.name, id=identity, resume="allow", dir=str(folder.root))
        self._tracker.start()
        self._tracker.store_init_configuration(dict(recipe))

    def log_samples(self, title: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        import wandb

        data = [[wandb.Image(str(value)) if isinstance(value, Path) else value for value in row.values()] for row in rows]
        self._tracker.log_table(f"samples/{title}", columns=list(rows[0]), data=data, step=step)


class Trackio(_AccelerateTracker):
    """A Trackio run through accelerate's tracker; an existing run is continued. Trackio finds it by its name, which therefore is
    the run's name with its ``tracker_id``."""

    def __init__(self, folder: RunFolder, *, project: str, recipe: Mapping[str, Any]) -> None:
        require_trackers(["trackio"])
        from accelerate import PartialState
        from accelerate.tracking import TrackioTracker

        PartialState()
        self._tracker = TrackioTracker(
            project, name=f"{folder.name}-{tracker_id(folder.root)}", resume="allow", config=dict(recipe)
        )
        self._tracker.start()

    def log_samples(self, title: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        import pandas  # type: ignore[import-untyped]  # comes with datasets
        import trackio

        shown = [{name: trackio.Image(value) if isinstance(value, Path) else value for name, value in row.items()} for row in rows]
        self._tracker.log({f"samples/{title}": trackio.Table(dataframe=pandas.DataFrame(shown))}, step=step)


@dataclass(frozen=True, eq=False)
class CompositeTracker:
    """Forwards metrics to several trackers, tables to those with ``log_samples``, and pictures to those with ``log_picture``."""

    trackers: Sequence[Any]

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Show these values at this step; a value of None (could not be measured) is left out."""
        for tracker in self.trackers:
            tracker.log(values, step)

    def log_samples(self, title: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Show a table. ``rows``: by column, a text, number, None, or the ``Path`` of an image; all rows have the same columns."""
        for tracker in self.trackers:
            if rows and hasattr(tracker, "log_samples"):
                tracker.log_samples(title, rows, step)

    def log_picture(self, title: str, draw: Callable[[], Image], step: int) -> None:
        for tracker in self.trackers:
            if hasattr(tracker, "log_picture"):
                tracker.log_picture(title, draw, step)

    def close(self) -> None:
        """Send all buffered values. Do not call ``log`` afterwards."""
        for tracker in self.trackers:
            tracker.close()


def open_trackers(
    names: Sequence[TrackerName], folder: RunFolder, *, project: str, recipe: Mapping[str, Any], first_step: int
) -> CompositeTracker:
    """Open the trackers with these names; call it only on the rank that writes.

    With several ranks, the process group must already exist. ``recipe``: shown with the curves. ``first_step``: the first step
    that will be logged (after a resume, the next step). Raises ValueError if a tracker is unknown or not installed.
    """
    opened: list[TensorBoard | Wandb | Trackio] = []
    for name in names:
        if name == "tensorboard":
            if find_spec("tensorboard") is not None:
                opened.append(TensorBoard(folder, first_step=first_step))
            else:  # it is a default, so its absence stops no run
                log.info("no curves for TensorBoard, which is not installed (retouch[tensorboard]); the report has the same curves")
        elif name == "wandb":
            opened.append(Wandb(folder, project=project, recipe=recipe))
        elif name == "trackio":
            opened.append(Trackio(folder, project=project, recipe=recipe))
        else:
            raise ValueError(f"unknown tracker {name!r}; choose from tensorboard, wandb, trackio")
    return CompositeTracker(opened)


def tracker_id(root: Path, *, given: str | None = None) -> str:
    """Return the id under which trackers know the run in the folder ``root``; it is stored in ``tracker.json``.

    The id is ``given``, or random at the first call. A run that resumes keeps it, also after its folder was moved; a copy of a
    folder that is still there gets its own. Raises ValueError if ``tracker.json`` is damaged.
    """
    here = root.resolve()
    known, place = _stored_id(root)
    if place != here and known is not None and _stored_id(place)[0] == known:
        known = None
    identity = given or known or secrets.token_hex(4)
    if (identity, here) != (known, place):
        files.write_json(root / "tracker.json", {"id": identity, "folder": here})
    return identity


def _stored_id(root: Path) -> tuple[str | None, Path]:
    """Return the id in the folder ``root``, or None, and the folder in which it was stored."""
    path = root / "tracker.json"
    found = files.read_record(path) if path.is_file() else {"id": None, "folder": ""}
    if not isinstance(found, dict) or not isinstance(found.get("id"), str | None) or not isinstance(found.get("folder"), str):
        raise ValueError(f"{path} was changed and holds no id; delete it, and trackers show the run as a new one")
    return found["id"], Path(found["folder"])


def _measured(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
