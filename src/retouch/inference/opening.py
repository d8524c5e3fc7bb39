"""Opens a policy for use: the untrained policy of a recipe, or the newest checkpoint in a run's folder; a language model alone; and
``retouch eval``, which evaluates a run, or the untrained policy of a recipe, on held-out tasks or on a whole data set."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import overload

from PIL.Image import Image

from retouch.config.packaged import is_recipe
from retouch.core.answers import answer_in
from retouch.data.base import DataSource
from retouch.data.kinds import DATA
from retouch.distributed.ranks import init_distributed_from_recipe
from retouch.models.parts import frozen_hashes
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.recipe.policy import AutoregressivePolicyKeys
from retouch.recipe.recipe import Recipe, load, parse
from retouch.records.folder import RunFolder, find_run
from retouch.records.libraries import silence_libraries
from retouch.run import checkpoint
from retouch.run.build import Assembly, PolicyParts, assemble, assemble_policy
from retouch.run.checkpoint import TrainState, restore_weights
from retouch.run.evaluation import build_evaluator, headline_tasks, score_table
from retouch.run.ledger import require_same_weights
from retouch.types import Batch, Task

_ALL = 10**9  # tasks: more than any data set has


def open_recipe(recipe: Recipe, folder: RunFolder | None, *, trained: bool) -> tuple[Assembly, int]:
    """The parts of a recipe with the newest weights in the run's folder, and the step of the weights (0: untrained).

    Raises ValueError if ``trained`` and the run has no checkpoint.
    """
    recipe = recipe.model_copy(update={"policy": recipe.policy.for_inference()})  # without kernels that this machine may lack
    parts = assemble(recipe, init_distributed_from_recipe(recipe), trains=False)
    return parts, _restored(parts, folder, trained=trained)


def open_policy(recipe: Recipe, folder: RunFolder | None) -> tuple[PolicyParts, int]:
    """The policy and the renderer of a run with the weights of its newest checkpoint, and the step of the weights (0: untrained,
    without a folder). Data and judge are not loaded.

    Raises ValueError if the run has no checkpoint.
    """
    recipe = recipe.model_copy(update={"policy": recipe.policy.for_inference()})  # without kernels that this machine may lack
    parts = assemble_policy(recipe, init_distributed_from_recipe(recipe))
    return parts, _restored(parts, folder, trained=True)


@dataclass(frozen=True, slots=True)
class WriterOutput:
    """``text``: the completion. ``prompt``: the prompt in it, None if there is none. ``truncated``: it has no end token."""

    text: str
    prompt: str | None
    truncated: bool


@dataclass(eq=False)
class Writer:
    """Generates completions with greedy decoding, under the averaged weights if the run has them. The completion for an instruction
    does not depend on the other instructions of a call."""

    policy: AutoregressivePolicy
    batch: int = field(kw_only=True)

    @overload
    def __call__(self, instruction: str, images: Sequence[Image] = ()) -> WriterOutput: ...
    @overload
    def __call__(self, instruction: list[str]) -> list[WriterOutput]: ...
    def __call__(self, instruction: str | list[str], images: Sequence[Image] = ()) -> WriterOutput | list[WriterOutput]:
        """The completion for one instruction and its source images, or the completions for a list of instructions."""
        if not isinstance(instruction, str):
            return self.many(instruction, [images] * len(instruction))
        (output,) = self.many([instruction], [images])
        return output

    def many(self, instructions: Sequence[str], images: Sequence[Sequence[Image]] | None = None) -> list[WriterOutput]:
        """The completions for several instructions, each with its images. ValueError if the numbers of both differ."""
        sources = [()] * len(instructions) if images is None else images
        if len(sources) != len(instructions):
            raise ValueError(f"{len(instructions)} instructions, but images for {len(sources)}: use [] for no images")
        tasks = [
            Task(id=str(row), instruction=text, images=tuple(own))
            for row, (text, own) in enumerate(zip(instructions, sources, strict=True))
        ]
        found = []
        for first in range(0, len(tasks), self.batch):
            part = tasks[first : first + self.batch]
            rows = tuple(range(len(part)))
            batch = Batch(seed=0, step=0, tasks=tuple(part), group_ids=rows, group=rows, slot=(0,) * len(rows))
            found += self.policy.sample(batch).outputs
        return [WriterOutput(each.text, answer_in(each.text), each.truncated) for each in found]


def open_writer(target: str, overrides: Sequence[str] = (), *, allow_imports: Iterable[str] = ()) -> Writer:
    """Load only the language model of a recipe or run: no data, no judge, and an image model only if it defines the prompts.

    ``allow_imports``: modules outside Retouch that the recipe may import; not needed for your own runs. Raises ValueError for a
    policy that generates no text.

    Example::

        >>> retouch.open_writer("sd3/prompt-enhancer-playground")("a red circle").truncated
        False
    """
    silence_libraries()
    recipe, folder = read_target(target, overrides, allow_imports)
    policy, renderer, rollout = recipe.policy, recipe.renderer, recipe.rollout
    if not isinstance(policy, AutoregressivePolicyKeys) or not isinstance(rollout, TokenRollout) or renderer is None:
        raise ValueError(f"{target}: its policy is an image model and generates no text; use `retouch sample`")
    device = init_distributed_from_recipe(recipe).device
    model = renderer.load_writer(partial(policy.build_model, device=device))
    policy.make_trainable(model.module, seed=recipe.seed)
    copies = WeightCopies(model.module)
    state = _newest(folder, trained=True)
    if state is not None:
        for name in {key.partition("/")[0] for key in state.tensors["copies"]} - {checkpoint.TEXT_TO_IMAGE.rstrip("/")}:
            copies.snapshot(name)
        assert folder is not None, "the state is from there"
        require_same_weights(folder, frozen_hashes({"policy": model}))
        restore_weights(copies, state)
    built = AutoregressivePolicy(model, sampling=rollout, microbatch=recipe.microbatch, copies=copies)
    return Writer(built, batch=recipe.eval.batch)


def _restored(parts: PolicyParts, folder: RunFolder | None, *, trained: bool) -> int:
    state = _newest(folder, trained=trained)
    if state is None:
        return 0
    assert folder is not None, "the state is from there"
    require_same_weights(folder, parts.base_hashes())
    restore_weights(parts.copies, state, parts.painted)
    return state.step


def _newest(folder: RunFolder | None, *, trained: bool) -> TrainState | None:
    """The state of the newest checkpoint; None without a folder. Raises ValueError if ``trained`` and the run has no checkpoint."""
    if folder is None:
        return None
    state = checkpoint.load_latest(folder.checkpoints, groups=("weights", "copies"))
    if state is None and trained:
        raise ValueError(f"{folder.root} has no checkpoint yet; name its recipe to use the untrained policy")
    return state


def read_target(target: str, overrides: Sequence[str] = (), allow_imports: Iterable[str] = ()) -> tuple[Recipe, RunFolder | None]:
    """The recipe of a file or of a run, with ``overrides``, and the folder if it is a run.

    ``target``: the folder of a run, a recipe as for ``load``, or the name of a run in the folder ``runs``; the first that is found.
    """
    folder = RunFolder(Path(target) if is_recipe(target) else find_run(target))
    if folder.recipe.is_file():
        folder.require_plain()
        return parse(folder.read_recipe()["recipe"], overrides, allow_imports=allow_imports), folder
    return load(target, overrides, allow_imports=allow_imports), None


def evaluate_target(target: str, overrides: Sequence[str], *, data: str | None = None) -> dict[str, object]:
    """Return the column means and their 95 % confidence intervals, by row of the held-out table, and the step of the weights.

    ``data``: a path or Hub id whose rows are all evaluated in place of the held-out tasks; ``overrides`` are applied after it. A
    recipe with ``data.held_out: "all"`` is evaluated on all rows too, unless ``overrides`` limit them by ``eval.tasks``.
    """
    if data is not None:
        overrides = [*whole_data(data, read_target(target)[0].data), *overrides]
    silence_libraries()
    recipe, folder = read_target(target, overrides)
    if data is None and getattr(recipe.data, "held_out", None) == "all":
        recipe, folder = read_target(target, [f"eval.tasks={_ALL}", *overrides])
    parts, step = open_recipe(recipe, folder, trained=True)
    try:
        evaluated = build_evaluator(parts, parts.judge.for_split("heldout", step))(parts.policy(parts.recipe.rollout))
        means, intervals = score_table(evaluated, headline_tasks(evaluated.tasks, parts.recipe.eval.headline))
    finally:
        parts.judge.close()
    return {"name": parts.recipe.name, "step": step, "table": means, "ci95": intervals}


def whole_data(path: str, section: DataSource) -> list[str]:
    """The changes of a recipe, as for ``--set``, with which it evaluates all rows at ``path`` (a file, a folder or a Hub id).

    The keys of the recipe's data ``section``, such as columns, are kept if ``path`` has the layout of this section. Raises
    ValueError if there is nothing at ``path``.
    """
    where, kind = Path(path), section.label if section.on_hub else "hub"
    if where.exists():
        if type(section).rows_at(where) is not None:
            kind = section.label
        else:
            classes = ((each, DATA.load(each)) for each in DATA)
            known = (
                each for each, found in classes if found and issubclass(found, DataSource) and found.rows_at(where) is not None
            )
            kind = next(known, kind)
    elif not section.on_hub and path.count("/") != 1:
        raise ValueError(f"--data {path}: no such file or folder, and not the id of a data set on the Hugging Face Hub")
    changes = ["eval.split=test", f"eval.tasks={_ALL}", "eval.headline=null"]
    if kind != section.label:
        return [f"data={json.dumps({'kind': kind, 'path': path, 'held_out': 'all'})}", *changes]
    keys = section.keys_for_all(path)
    if "kind" in keys:
        return [f"data={json.dumps(keys)}", *changes]
    return [*(f"data.{key}={json.dumps(value)}" for key, value in keys.items()), *changes]
