"""The ``Trainer``: a run as a Python object."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image
from tqdm.auto import tqdm

from retouch.config import consent, wings
from retouch.config.section import live_objects
from retouch.distributed.ranks import scoring_device
from retouch.inference.exporting import push_folder, write_export
from retouch.inference.opening import open_recipe
from retouch.models.train import Format
from retouch.objectives.base import Objective
from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe, load, parse
from retouch.records.folder import RunFolder, Summary
from retouch.records.libraries import silence_libraries
from retouch.rewards.function import FunctionReward
from retouch.rewards.judging import RewardScorer
from retouch.run.build import Assembly
from retouch.run.evaluation import EvaluationResult, build_evaluator, headline_tasks, score_table
from retouch.run.hooks import Hook, StepResult
from retouch.run.recorder import STEP_LINE, before_and_after
from retouch.run.session import open_session
from retouch.run.step import ScoredRollout
from retouch.trainer.arguments import FITTED, DescribedRun, RewardLike, chosen_lines, describe, is_told

log = logging.getLogger("retouch")


class Trainer:
    """Trains a model with rewards, as ``retouch train`` does with a recipe.

    ``model``: what is trained: a loaded diffusers pipeline or transformers model, a folder or Hugging Face id, or a section such as
    ``retouch.models.SD3(path=...)``. ``processing_class``: the tokenizer or processor of a loaded transformers model; by default
    that of its folder or repository. ``reward_funcs``: one reward or several: reward objects, plain functions (see
    ``retouch.reward``), or names; only ``retouch.DPO(pairs="data")``, which learns from pairs of images, needs none.
    ``reward_weights``: how the rewards are combined into one number: a weight for each reward, weights by column, or a formula such
    as ``"sqrt(clip/similarity * ocr/score)"``; by default their sum. ``train_dataset``: a ``datasets.Dataset``, a list of
    dictionaries, a folder, or a data source; ``eval_dataset``: a second table for evaluation, otherwise rows are held out.
    ``columns``: field of a task to column of the data set, if the names differ. ``objective``: by default GRPO. ``peft_config``:
    which weights are trained: ``retouch.Lora(...)``, a ``peft.LoraConfig``, or None for all weights. ``quantization_config``: how
    the frozen weights of a folder or id are stored: "8bit", "4bit", or a ``TorchAoConfig`` or ``BitsAndBytesConfig`` that means the
    same. ``call``: arguments of a pipeline without a family of its own. ``renderer``: for a language model, the pipeline that
    makes images from the prompts that it writes, or that reads its responses and edits the source images.
    ``size``: (height, width) in px of the images, or one number for squares. ``dtype``: of the frozen weights and the forward pass.
    What these two and other keys are by default depends on the model and the device (docs/python.md). ``output_dir`` and
    ``run_name``: the run's folder is ``output_dir/run_name``. ``callbacks``: one or several; see ``Callback``. ``progress``: show a
    progress bar and, if the script has not set up logging, what `retouch train` prints. ``keys``: every other key of a recipe, with
    the same names and checks: ``steps``, ``group_size``, ``rollout``, ...

    A loaded model is trained in place. Nothing starts before ``train`` is called, but every argument is checked here.

    Raises ValueError with one line for each mistake.

    Example::

        >>> trainer = retouch.Trainer(
        ...     model=pipe,
        ...     reward_funcs=brightness,
        ...     train_dataset=[{"prompt": "a red bicycle"}, {"prompt": "two cats"}],
        ...     peft_config=retouch.Lora(rank=8, alpha=16),
        ...     size=(32, 32),
        ...     steps=1,
        ...     group_size=2,
        ...     tasks_per_step=1,
        ... )
        >>> trainer.train().steps
        1
        >>> files = trainer.save_pretrained("lora")
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: RewardLike | Sequence[RewardLike] | None = None,
        train_dataset: Any = None,
        *,
        eval_dataset: Any = None,
        objective: Objective | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        processing_class: Any = None,
        call: Mapping[str, Any] | None = None,
        renderer: Any = None,
        reward_weights: Sequence[float] | Mapping[str, float] | str | None = None,
        columns: Mapping[str, str] | None = None,
        size: tuple[int, int] | int | None = None,
        dtype: Any = None,
        learning_rate: float = 1e-4,
        output_dir: str | Path = "runs",
        run_name: str | None = None,
        callbacks: Callback | Sequence[Callback] = (),
        progress: bool = True,
        **keys: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "callbacks", "progress", "keys")}
        told = {**arguments, **keys}
        self._start(describe(**told, gpu=_is_gpu(keys.get("device", "auto"))), callbacks=callbacks, progress=progress, told=told)

    @classmethod
    def from_recipe(
        cls,
        recipe: str | Path | Mapping[str, Any] | Recipe,
        overrides: Sequence[str] = (),
        *,
        allow_imports: Sequence[str] = (),
        callbacks: Callback | Sequence[Callback] = (),
        progress: bool = True,
    ) -> Trainer:
        """Create a trainer from a recipe: a file, the name of a packaged recipe, or a document.

        ``overrides``: ``key=value``, as for ``--set`` of the command. ``allow_imports``: modules outside Retouch that the recipe
        may import. Raises ValueError with one line for each mistake.
        """
        if isinstance(recipe, str | Path):
            made = load(recipe, overrides, allow_imports=allow_imports)
        elif isinstance(recipe, Recipe):
            made = recipe
        else:
            made = parse(recipe, overrides, allow_imports=allow_imports)
        trainer = cls.__new__(cls)
        trainer._start(DescribedRun(made, {}, tuple(allow_imports)), callbacks=callbacks, progress=progress)
        return trainer

    def _start(
        self,
        described: DescribedRun,
        *,
        callbacks: Callback | Sequence[Callback],
        progress: bool,
        told: dict[str, Any] | None = None,
    ) -> None:
        listed = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in listed:
            if not isinstance(callback, Callback):
                raise ValueError(f"callbacks: {callback!r:.60} is not a retouch.Callback; derive a class from it")
        self.recipe = described.recipe
        """The run as a recipe; ``trainer.recipe.document()`` is its JSON."""
        self.state = TrainerState()
        self.is_main = True
        """Whether this is the main process of the run."""
        self._told = told
        self._objects = described.objects
        self._modules = described.modules
        self._bar = ProgressBar() if progress else None
        self._callbacks = [*listed, *([] if self._bar is None else [self._bar])]
        self._parts: Assembly | None = None
        self._request: Any = None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.recipe.folder

    def doctor(self, device: str | None = None, *, command: str = "trainer.train()") -> bool:
        """Check the run before anything is downloaded, as ``retouch doctor`` checks a recipe, and print what was found.

        Returns whether the run is ready.

        ``device``: a device of this machine, a GPU by name (``"h100"``) or by memory (``"24gb"``), or the file of a measured
        profile. The default is this machine's GPU; without one, a common GPU if the weights are not on this machine. ``command``:
        what starts the run, for the last line. Raises ValueError for an unknown device.
        """
        absent = not all(each.find_weights()[1] for each in (self.recipe.policy.model, self.recipe.image_model))
        planned = device or (self.recipe.device if _is_gpu(self.recipe.device) or not absent else "h100")
        recipe = self._for_device(planned)
        with live_objects(self._objects), consent.allowing(self._modules):
            return bool(wings.load("part.doctor")(recipe, planned, command=command, chosen=chosen_lines(recipe)))

    def _for_device(self, device: str) -> Recipe:
        """The recipe with the defaults for a device: on a GPU, sizes of batches and ways to save memory that fit into it."""
        if self._told is None:
            return self.recipe
        gpu = _is_gpu(device)
        recipe = describe(**self._told, gpu=gpu).recipe
        with live_objects(self._objects), consent.allowing(self._modules):
            chosen = wings.load("part.fit")(recipe, device, allow_imports=self._modules) if gpu else {}
        return self._with(recipe, chosen)

    def _with(self, recipe: Recipe, chosen: Mapping[str, Any]) -> Recipe:
        """The recipe with the ``chosen`` values of keys that the script does not set."""
        changes = [f"{key}={json.dumps(value)}" for key, value in chosen.items() if not is_told(self._told or {}, key)]
        return parse(recipe.document(), changes, allow_imports=self._modules)

    def train(self, *, fresh: bool = False, new_judge: bool = False) -> Summary | None:
        """Train to the end, or resume the run in ``folder``; returns the comparison of held-out scores before and after.

        ``fresh``: rename an existing run of this name and start from the beginning. ``new_judge``: the run may resume with another
        reward. The result is None if the run was stopped, and on all ranks but the first. Raises ValueError if the run fails, with
        the reason. If too many scores were missing, a budget was spent or an engine failed, the last finished step is saved first;
        after other errors, the next call resumes from the newest checkpoint.
        """
        for _ in self.steps(fresh=fresh, new_judge=new_judge):
            pass
        if not self.is_main or self.state.step < self.state.steps:
            return None
        return RunFolder(self.folder).read_summary()

    def __iter__(self) -> Iterator[StepResult]:
        """Train step by step: ``for step in trainer: print(step.metrics["reward/mean"])``. If the loop ends early, a checkpoint is
        saved."""
        return self.steps()

    def steps(self, *, fresh: bool = False, new_judge: bool = False) -> Iterator[StepResult]:
        """Like ``train``, but yields each step after it was recorded."""
        self.state = TrainerState()
        if self._told is not None and _is_gpu(self.recipe.device) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            folder = RunFolder(self.folder)
            if fresh or not folder.has_steps():
                self.recipe = self._for_device(self.recipe.device)
            else:  # the same sizes of batches, so that the run continues with the same bits
                stored = folder.read_recipe()["recipe"]
                kept = {key: value for key in FITTED if (value := value_at(stored, key)) is not None}
                self.recipe = self._with(self.recipe, kept)
            for line in chosen_lines(self.recipe):
                log.info("%s", line)
        with ExitStack() as stack:
            if self._bar is not None:
                if not log.hasHandlers() and os.environ.get("RANK", "0") == "0":  # the script has not said where logs go
                    silence_libraries()
                    log.addHandler(shown := _Terminal())
                    stack.callback(log.removeHandler, shown)
                stack.callback(self._bar.close)
            with live_objects(self._objects), consent.allowing(self._modules):
                opened = open_session(self.recipe, fresh=fresh, new_judge=new_judge, hooks=[_Callbacks(self)], own_process=False)
                session = stack.enter_context(opened)
            self._parts, self._request = session.parts, session.request
            self.is_main = session.parts.ranks.is_main
            self.state.steps = session.parts.steps
            yield from session.steps()
            self.state.step = session.done
            for _, _, section in self.recipe.reward.parts():
                live = (
                    self._objects.get(section.live_name) if isinstance(section, FunctionReward) and section.range is None else None
                )
                if live is not None and live.low is not None:
                    declare = "declare it with @retouch.reward(low=..., high=...)"
                    log.info("reward %s scored from %.4g to %.4g; %s", section.name, live.low, live.high, declare)

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint; ``train`` continues it later."""
        self.state.stopped = True
        if self._request is not None:
            self._request.stop()

    def evaluate(self) -> ScoreTable:
        """Score the held-out tasks with the current weights. The table maps row ("all", "tag=value") to column to mean, and has
        ``intervals``."""
        parts = self._assembled()
        with live_objects(self._objects), consent.allowing(self._modules):
            device = parts.placement.reward
            judge = RewardScorer(self.recipe.reward.build(device=device), self.recipe.reward.combine, device=device)
        try:
            evaluator = build_evaluator(parts, lambda batch, samples: judge.submit(samples))
            return self._table(evaluator(parts.policy(self.recipe.rollout)))
        finally:
            judge.close()

    def _table(self, result: EvaluationResult) -> ScoreTable:
        return ScoreTable(*score_table(result, headline_tasks(result.tasks, self.recipe.eval.headline)))

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            instead = {"save_model": "save_pretrained(folder)", "log": "callbacks", "predict": "evaluate() or retouch.sample"}.get(
                name
            )
            hint = f"; write {instead}" if instead else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}")

    def save_pretrained(self, folder: str | Path, *, format: Format = "all") -> list[Path]:
        """Write the trained weights, a LoRA or the whole transformer, with a model card; returns the files.

        ``format``: the format of a LoRA: ``diffusers``, ``peft``, ``comfyui``, or ``all`` that exist for the model. On several
        ranks, the first one writes, and the others return an empty list. Raises ValueError if the folder contains something else,
        if nothing was trained yet, if the model has no such format, or if the weights are sharded by fsdp2.
        """
        if not self.is_main:
            return []
        to = Path(folder)
        if to.exists() and not to.is_dir():
            raise ValueError(f"{to} is a file; give a new folder")
        if to.exists() and any(to.iterdir()) and not (to / "export.json").is_file():
            raise ValueError(f"{to} is not empty; give a new folder")
        parts = self._assembled()
        if self.state.step == 0:
            raise ValueError("nothing was trained yet; call train() first")
        if self.recipe.sharding == "fsdp2" and parts.ranks.world > 1:
            raise ValueError(f"with fsdp2 no rank has the whole weights; after the run, `retouch export {self.folder} --to {to}`")
        return write_export(parts, to, step=self.state.step, format=format)

    def push_to_hub(self, repo: str, *, private: bool = True) -> str:
        """Upload the files of ``save_pretrained`` to the Hugging Face Hub; returns the address, which is empty on all ranks but the
        first.

        ``repo``: ``USER/NAME``; it is created if it does not exist. Raises ValueError without a token, or if the Hub refuses it.
        """
        if not self.is_main:
            return ""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return push_folder(Path(folder), repo, private=private, message=f"{self.recipe.name}, step {self.state.step}")

    def samples(self) -> Image:
        """Held-out images before and after training, with prompts and rewards: source (for editors), before, after."""
        return before_and_after(self.folder)

    def _assembled(self) -> Assembly:
        """The parts of the run with its newest weights; built from the newest checkpoint if this process has not trained."""
        if self._parts is None:
            with live_objects(self._objects), consent.allowing(self._modules):
                self._parts, self.state.step = open_recipe(self.recipe, RunFolder(self.folder), trained=False)
        return self._parts


@dataclass(eq=False)
class _Callbacks(Hook):
    """Forwards the events of the session to the trainer's state and callbacks."""

    trainer: Trainer

    def resumed(self, step: int) -> None:
        state = self.trainer.state
        state.step = step
        try:
            folder, found = RunFolder(self.trainer.folder), dict[tuple[int, bool], dict[str, Any]]()
            for line in folder.read_metrics():
                found[line["step"], False] = {key: line[key] for key in line if key != "phase"}
            for line in folder.read_evals():
                if line["split"] == "heldout":
                    found[line["step"], True] = evaluation_entry(line["step"], line["table"]["all"])
            kept = [found[key] for key in sorted(found) if key[0] <= step]  # an evaluation comes after its step
            state.log_history = [{key: math.nan if value is None else value for key, value in entry.items()} for entry in kept]
        except ValueError as error:  # others can damage the files; this must not stop the run
            log.warning("state.log_history lacks the steps before this start: %s", error)

    def after_step(self, result: StepResult, collected: ScoredRollout) -> None:
        trainer = self.trainer
        trainer.state.step, trainer.state.steps = result.step, result.steps
        trainer.state.log_history.append({"step": result.step, **result.metrics})
        for callback in trainer._callbacks:
            callback.on_step(trainer, result.step, result.metrics)

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        trainer = self.trainer
        table = trainer._table(result)
        history = trainer.state.log_history
        # A resumed run may make the evaluation after a step again.
        kept = [
            entry
            for entry in history
            if entry["step"] != step or any(not (key == "step" or key.startswith(_EVALUATION)) for key in entry)
        ]
        history[:] = [*kept, evaluation_entry(step, table["all"])]
        for callback in trainer._callbacks:
            callback.on_evaluate(trainer, step, table)

    def saved(self, step: int, folder: Path) -> None:
        for callback in self.trainer._callbacks:
            callback.on_save(self.trainer, step, folder)


@dataclass
class TrainerState:
    """The progress of a run. ``step``: completed steps. ``steps``: all steps of the run. ``stopped``: whether ``stop`` was called.

    ``log_history``: one entry per step with its metrics, and one per evaluation with ``eval/COLUMN`` means over the held-out tasks,
    each with ``step``. If the run is resumed, or is already finished, it begins with the entries of the earlier starts.
    """

    step: int = 0
    steps: int = 0
    stopped: bool = False
    log_history: list[dict[str, Any]] = field(default_factory=list)


class ScoreTable(dict[str, dict[str, float]]):
    """The table of an evaluation, a dictionary: row ("all", "tag=value") to column to mean; the column ``n`` counts tasks.

    ``intervals``: row to column to (low, high), the 95 % confidence interval of the mean, if the row has scores of 8 or more
    sources.
    """

    def __init__(self, means: Mapping[str, dict[str, float]], intervals: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
        super().__init__(means)
        self.intervals = intervals


class Callback:
    """Base class of callbacks: override the methods that you need. Any method may call ``trainer.stop()``: the run then ends after
    the current step, with a checkpoint. With several ranks, every rank calls its own callbacks.

    Example::

        >>> class StopEarly(retouch.Callback):
        ...     def on_step(self, trainer, step, metrics):
        ...         if metrics["reward/mean"] > 0.95:
        ...             trainer.stop()
    """

    def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """A step was completed. ``step``: its number, from 1. ``metrics``: its line of ``metrics.jsonl``."""

    def on_evaluate(self, trainer: Trainer, step: int, table: ScoreTable) -> None:
        """The held-out tasks were evaluated."""

    def on_save(self, trainer: Trainer, step: int, folder: Path) -> None:
        """A checkpoint was written to ``folder``."""


class _Terminal(logging.Handler):
    """Prints what `retouch train` prints, except the lines of steps, which the bar shows."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg != STEP_LINE:
            tqdm.write(self.format(record))  # above the bar


class ProgressBar(Callback):
    """A tqdm bar with the mean reward, as a widget in notebooks. Only the main process shows it."""

    _bar: Any = None

    def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        if self._bar is None:
            self._bar = tqdm(total=trainer.state.steps, initial=step - 1, desc=trainer.recipe.name, disable=not trainer.is_main)
        name, value = ("reward", metrics["reward/mean"]) if "reward/mean" in metrics else ("loss", metrics.get("policy/loss"))
        self._bar.set_postfix({} if value is None else {name: f"{value:.4g}"}, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Close the bar at its current position."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _is_gpu(device: str) -> bool:
    """Whether a device means a GPU; ``auto`` does if this machine has one."""
    return device != "cpu" and (device != "auto" or scoring_device() != "cpu")


_EVALUATION = "eval/"


def evaluation_entry(step: int, means: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of an evaluation. ``means``: the row "all" of its table."""
    return {"step": step, **{f"{_EVALUATION}{column}": value for column, value in means.items() if column != "n"}}
