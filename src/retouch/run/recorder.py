"""The recorder writes a run's metrics, times and samples, and logs one line per step."""

import logging
import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import torch
from PIL.Image import Image

from retouch.data.images import load_image
from retouch.policies.decoding import AutoregressiveTrajectory
from retouch.policies.denoising import DenoisingTrajectory
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.recipe.keys import Samples
from retouch.records.files import inside
from retouch.records.folder import RunFolder, SampleRecord, SampleSet
from retouch.renderers.base import LatentRenderer
from retouch.run.evaluation import EvaluationResult
from retouch.run.metrics import completion_texts
from retouch.run.step import Metrics, ScoredRollout
from retouch.types import Kind, Sample, Scores, Trajectory

if TYPE_CHECKING:
    from retouch.records.trackers import CompositeTracker


class SampleDetails:
    """Reads only stored tensors, so nothing is sampled again. ``model``: the model that is trained."""

    def __init__(self, model: DenoisingModel | AutoregressiveModel, *, tokens: bool, states: bool) -> None:
        self._decode = model.decode if tokens and not isinstance(model, DenoisingModel) else None
        self._renderer = LatentRenderer(model) if states and isinstance(model, DenoisingModel) else None

    def tokens(self, trajectory: Trajectory, row: int) -> list[tuple[str, float]] | None:
        """Return the text tokens that the policy sampled in a row, with log-probabilities in nats; None if it sampled no text.

        Tokens that the grammar forced are left out, because the policy did not choose them.
        """
        if self._decode is None or not isinstance(trajectory, AutoregressiveTrajectory):
            return None
        chosen = trajectory.mask[row].cpu() & (trajectory.kind[row].cpu() == Kind.TEXT_TOKEN)
        if not chosen.any():
            return None
        ids, log_probs = (each[row].cpu()[chosen].tolist() for each in (trajectory.ids, trajectory.log_probs))
        return [(self._decode([token]), value) for token, value in zip(ids, log_probs, strict=True)]

    @torch.no_grad()
    def states(self, collected: ScoredRollout, row: int) -> list[Image]:
        """Return an image of each state of the row, before each action and after the last one, including its remaining noise.

        Empty for a policy that does not denoise.
        """
        trajectory = collected.trajectory
        if self._renderer is None or not isinstance(trajectory, DenoisingTrajectory):
            return []
        task = collected.batch.tasks[collected.batch.group[row]]
        single = trajectory.take(slice(row, row + 1))
        latents = (single.latents[:, place] for place in range(single.latents.shape[1]))
        found = (self._renderer([task], replace(single, outputs=each))[0] for each in latents)
        return [image for image in found if image is not None]


log = logging.getLogger("retouch")
STEP_LINE = "step %s"  # the message of a step's line
_HELDOUT = {"all": "heldout", "headline": "headline"}  # rows of the held-out table, and their names in trackers


@dataclass(eq=False)
class Recorder:
    """Records a run; only the main rank uses it. ``total``: the number of steps of the run, for the remaining time. ``samples``:
    the section ``samples`` of the recipe. ``details``: reads the tokens and denoising states to store; None stores neither."""

    folder: RunFolder
    tracker: "CompositeTracker"
    _: KW_ONLY
    total: int
    samples: Samples
    details: SampleDetails | None = None
    _began: tuple[float, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.resume_clock()

    def step(self, done: int, phase: str, metrics: Metrics, seconds: Mapping[str, float]) -> None:
        """Record a step and log its line. ``done``: the number of finished steps, including this one."""
        self.folder.append_metrics(done, phase, metrics)
        now = time.perf_counter()
        self._began = self._began or (self._last, done - 1)
        timed = {**seconds, "time/step": now - self._last, "cpu/step": time.process_time() - self._cpu}
        self.resume_clock()
        self.folder.append_timings(done, timed)
        self.tracker.log({**metrics, **timed}, done)
        began, first = self._began
        pace = (now - began) / (done - first)
        left = pace * (self.total - done)
        words = [f"{done}/{self.total}"] + ([] if phase == "main" else [phase])
        if "reward/mean" in metrics:
            words.append(f"reward {metrics['reward/mean']:.3f}")
            if not math.isnan(metrics["group/zero_std_fraction"]):  # NaN for groups of one sample
                words.append(f"equal groups {metrics['group/zero_std_fraction']:.0%}")
            if metrics["reward/missing_fraction"]:
                words.append(f"missing {metrics['reward/missing_fraction']:.1%}")
        losses = [("loss", "policy/loss"), ("text_to_image's loss", "text_to_image/loss")]
        words += [f"{word} {metrics[name]:.4g}" for word, name in losses if name in metrics]
        words += [f"{pace:.2f} s/step", f"{int(left) // 60}:{int(left) % 60:02d} left"]
        log.info(STEP_LINE, "  ".join(words))

    def resume_clock(self) -> None:
        """Start timing the next step now. Work between two steps (an evaluation, for example) is not part of a step."""
        self._last, self._cpu = time.perf_counter(), time.process_time()

    def groups(self, done: int, collected: ScoredRollout) -> None:
        """Store the samples of the step's first groups."""
        if collected.judged is None:
            return
        batch, texts = collected.batch, completion_texts(collected.trajectory)
        records: list[SampleRecord] = []
        shown = set(list(dict.fromkeys(batch.group_ids))[: self.samples.groups])
        for row, group in enumerate(batch.group):
            if batch.group_ids[group] in shown:
                first = not records or records[-1].group != batch.group_ids[group]
                mask = collected.trajectory.mask[row].cpu()
                records.append(
                    SampleRecord(
                        sample=Sample(batch.tasks[group], collected.images[row]),
                        group=batch.group_ids[group],
                        slot=batch.slot[row],
                        scores=_row(collected.judged.scores, row),
                        reward=collected.judged.rewards[row].item(),
                        advantage=collected.advantages[row][mask].mean().item() if mask.any() else 0.0,
                        text=texts[row],
                        tokens=None if self.details is None else self.details.tokens(collected.trajectory, row),
                        states=[] if self.details is None or not first else self.details.states(collected, row),
                    )
                )
        self._write(done, "group", records)

    def heldout(self, done: int, evaluated: EvaluationResult) -> None:
        """Store the images of the first held-out tasks, and show them and the means of all tasks in the trackers."""
        records = [
            SampleRecord(
                sample=Sample(evaluated.tasks[row], image),
                group=row,
                slot=0,
                scores=_row(evaluated.scores, row),
                reward=evaluated.rewards[row].item(),
                text=text,
            )
            for row, (image, text) in enumerate(zip(evaluated.images, evaluated.texts, strict=True))
        ]
        self._write(done, "heldout", records)
        tables = [line["table"] for line in self.folder.read_evals() if line["step"] == done]
        cells = [(row, *cell) for table in tables for row in _HELDOUT for cell in table.get(row, {}).items()]
        self.tracker.log({f"{_HELDOUT[row]}/{column}": mean for row, column, mean in cells if column != "n"}, done)
        if records:
            draw = cache(partial(before_and_after, self.folder.root, until=done))  # once for all trackers, and not without any
            self.tracker.log_picture("samples/before_and_after", draw, done)

    def _write(self, done: int, kind: SampleSet, records: Sequence[SampleRecord]) -> None:
        self.folder.write_samples(done, kind, records)
        if self.samples.tables:
            rows, folder = [], self.folder.samples(done)
            for line in self.folder.read_samples(done):
                if line["set"] == kind:
                    row = {name: line.get(name) for name in ("task", "slot", "instruction", "text", "reward", "advantage")}
                    paths = {name: None if line[name] is None else folder / line[name] for name in ("source", "image")}
                    rows.append({**row, **paths, **line["scores"]})
            self.tracker.log_samples(kind, rows, done)


def _row(scores: Scores, row: int) -> dict[str, float]:
    return {name: column[row].item() for name, column in scores.items()}


def before_and_after(folder: Path, *, rows: int = 8, side: int = 128, until: int | None = None) -> PIL.Image.Image:
    """Draw the first ``rows`` held-out tasks: the prompt, and below it the source image (if there is one), and the images before
    and after training with their rewards; each at most ``side`` px, tiny ones enlarged by a whole factor.
    ``until``: the latest step to show; None means the latest step with images. Raises ValueError if the run has no images yet.
    """
    run = RunFolder(folder)
    steps = [step for step in run.sample_steps() if until is None or step <= until]

    def heldout(step: int) -> dict[str, dict[str, Any]]:
        return {line["task"]: line for line in run.read_samples(step) if line["set"] == "heldout"}

    ends = [next(filter(None, map(heldout, order)), {}) for order in (steps, reversed(steps))]
    if not ends[0]:
        raise ValueError(f"{folder} has no images yet; train first, with samples.every above 0")
    ends = ends[:1] if ends[0] == ends[1] else ends
    tasks = [[each[task] for each in ends] for task in ends[-1] if task in ends[0]][:rows]
    sources = any(lines[0]["source"] for lines in tasks)
    pitch, font = side + 6, PIL.ImageFont.load_default(12)
    width = pitch * (len(ends) + sources)
    prompts = [textwrap.wrap(lines[0]["instruction"], max(20, width // 6), max_lines=3, placeholder=" ...") for lines in tasks]
    sheet = PIL.Image.new("RGB", (width, sum(15 * len(prompt) + side + 27 for prompt in prompts)), "white")
    draw, top = PIL.ImageDraw.Draw(sheet), 0
    for lines, prompt in zip(tasks, prompts, strict=True):
        draw.multiline_text((0, top), "\n".join(prompt), fill="black", font=font, spacing=3)
        top += 15 * len(prompt) + 2
        cells = [(lines[0], "source", "source")] if sources else []
        for line in lines:
            when = f"step {line['step']}" if line["step"] else "before"
            cells.append((line, "image", when if line["reward"] is None else f"{when}: {line['reward']:.3g}"))
        for column, (line, name, caption) in enumerate(cells):
            draw.text((column * pitch, top + side), caption, fill="#555555", font=font)
            if line[name] is not None:
                image = load_image(inside(run.samples(line["step"]), line[name]))
                factor = max(1, side // max(image.size))
                image = image.resize((image.width * factor, image.height * factor), PIL.Image.Resampling.NEAREST)
                image.thumbnail((side, side))
                sheet.paste(image, (column * pitch, top))
        top += side + 25
    return sheet
