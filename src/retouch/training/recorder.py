"""What a run writes as it goes: metrics, times, pictures, and the line that a person watches."""

import logging
import math
import time
from collections.abc import Mapping

from retouch.records.folder import RunFolder, SampleRecord
from retouch.records.trackers import Tracker
from retouch.training.completions import texts
from retouch.training.evaluation import Evaluated
from retouch.training.loop import Collected, Metrics
from retouch.types import Sample, Scores

log = logging.getLogger("retouch")


class Recorder:
    """Writes on the rank that writes. ``total``: steps of the run, for the time left."""

    def __init__(self, folder: RunFolder, tracker: Tracker, *, total: int, pictured_groups: int) -> None:
        self.folder = folder
        self.tracker = tracker
        self.total = total
        self.pictured_groups = pictured_groups
        self._began: tuple[float, int] | None = None
        self.resume_clock()

    def step(self, done: int, phase: str, metrics: Metrics, seconds: Mapping[str, float]) -> None:
        """Keep the step that brought the run to ``done`` steps, and say how it goes."""
        self.folder.append_metrics(done, phase, metrics)
        now = time.perf_counter()
        if self._began is None:
            self._began = (self._last, done - 1)
        timed = {**seconds, "time/step": now - self._last, "cpu/step": time.process_time() - self._cpu}
        self.resume_clock()
        self.folder.append_timings(done, timed)
        self.tracker.log({**metrics, **timed}, done)
        log.info(self._line(done, phase, metrics, now))

    def resume_clock(self) -> None:
        """Time from here: what came between two steps (an evaluation, say) is no part of the next."""
        self._last, self._cpu = time.perf_counter(), time.process_time()

    def groups(self, done: int, collected: Collected) -> None:
        """Keep the pictures of the step's first groups."""
        if collected.judged is None:
            return
        batch, kept, written = collected.batch, [], texts(collected.trajectory)
        for row, group in enumerate(batch.group):
            if group < self.pictured_groups:
                kept.append(
                    SampleRecord(
                        sample=Sample(batch.tasks[group], collected.images[row]),
                        group=batch.group_ids[group],
                        slot=batch.slot[row],
                        scores=_row(collected.judged.scores, row),
                        reward=collected.judged.rewards[row].item(),
                        advantage=_advantage(collected, row),
                        text=written[row],
                    )
                )
        self.folder.write_samples(done, "group", kept)

    def heldout(self, done: int, evaluated: Evaluated) -> None:
        """Keep the first held-out pictures."""
        kept = [
            SampleRecord(
                sample=Sample(evaluated.tasks[row], image),
                group=row,
                slot=0,
                scores=_row(evaluated.scores, row),
                reward=evaluated.rewards[row].item(),
                text=written,
            )
            for row, (image, written) in enumerate(zip(evaluated.images, evaluated.texts, strict=True))
        ]
        self.folder.write_samples(done, "heldout", kept)

    def _line(self, done: int, phase: str, metrics: Metrics, now: float) -> str:
        assert self._began is not None
        began, first = self._began
        pace = (now - began) / (done - first)
        left = pace * (self.total - done)
        told = [f"step {done}/{self.total}"] + ([] if phase == "main" else [phase])
        if "reward/mean" in metrics:
            told.append(f"reward {metrics['reward/mean']:.3f}")
            if not math.isnan(metrics["group/zero_std_fraction"]):  # as it is for groups of one
                told.append(f"equal groups {metrics['group/zero_std_fraction']:.0%}")
            if metrics["reward/missing_fraction"]:
                told.append(f"missing {metrics['reward/missing_fraction']:.1%}")
        told += [f"loss {metrics['policy/loss']:.4g}", f"{pace:.2f} s/step", f"{int(left) // 60}:{int(left) % 60:02d} left"]
        return "  ".join(told)


def _advantage(collected: Collected, row: int) -> float:
    """The mean of the row's actions, those that were a choice."""
    mask = collected.trajectory.mask[row].cpu()
    return collected.advantages[row][mask].mean().item() if mask.any() else 0.0


def _row(scores: Scores, row: int) -> dict[str, float]:
    return {name: column[row].item() for name, column in scores.items()}
