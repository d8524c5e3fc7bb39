"""Writes a run's report during the run."""

import logging

from retouch.records.folder import RunFolder
from retouch.run.hooks import Hook, StepResult
from retouch.run.step import ScoredRollout
from retouch_view.report.page import write_report

log = logging.getLogger("retouch")


class ReportHook(Hook):
    """Writes the report after each step whose samples are stored, and at the end of the run."""

    station = "evaluated"

    def __init__(self, folder: RunFolder, *, is_main: bool) -> None:
        self._folder, self._is_main = folder, is_main
        self._written = -1

    def after_step(self, step: StepResult, collected: ScoredRollout) -> None:
        if step.shown and step.step < step.steps:
            self._write(step.step)

    def ended(self, step: int, *, finished: bool) -> None:
        if step != self._written:
            self._write(step)

    def _write(self, step: int) -> None:
        if not self._is_main:
            return
        self._written = step
        self._folder.require_owner()
        try:
            log.info("report: %s", write_report(self._folder.root))
        except ValueError as error:  # others can damage the files that it shows; this must not stop the run
            log.warning("no report was written: %s", error)
