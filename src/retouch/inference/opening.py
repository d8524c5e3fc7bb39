"""Opens a policy for use: the untrained policy of a recipe, or the newest checkpoint in a run's folder."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from retouch.config.packaged import is_recipe
from retouch.distributed.placement import init_distributed_from_recipe
from retouch.inference.writers import Writer
from retouch.models.common.parts import frozen_hashes
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.context import PolicyContext
from retouch.policies.weights import WeightCopies
from retouch.recipe.policy import AutoregressivePolicyKeys
from retouch.recipe.recipe import Recipe, load, parse
from retouch.records.folder import RunFolder, find_run
from retouch.records.libraries import silence_libraries
from retouch.run import checkpoint
from retouch.run.build import Assembly, PolicyParts, assemble, assemble_policy
from retouch.run.checkpoint import TrainState
from retouch.run.identity import require_same_weights
from retouch.run.state import restore_weights


def open_recipe(recipe: Recipe, folder: RunFolder | None, *, trained: bool) -> tuple[Assembly, int]:
    """The parts of a recipe with the newest weights in the run's folder, and the step of the weights (0: untrained).

    Raises ValueError if ``trained`` and the run has no checkpoint.
    """
    recipe = _for_inference(recipe)
    parts = assemble(recipe, init_distributed_from_recipe(recipe), trains=False)
    return parts, _restored(parts, folder, trained=trained)


def open_policy(recipe: Recipe, folder: RunFolder | None) -> tuple[PolicyParts, int]:
    """The policy and the renderer of a run with the weights of its newest checkpoint, and the step of the weights (0: untrained,
    without a folder). Data and judge are not loaded.

    Raises ValueError if the run has no checkpoint.
    """
    recipe = _for_inference(recipe)
    parts = assemble_policy(recipe, init_distributed_from_recipe(recipe))
    return parts, _restored(parts, folder, trained=True)


def _for_inference(recipe: Recipe) -> Recipe:
    """The recipe without kernels that this machine may lack."""
    return recipe.model_copy(update={"policy": recipe.policy.for_inference()})


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
        for name in {key.partition("/")[0] for key in state.tensors["copies"]}:
            copies.snapshot(name)
        assert folder is not None, "the state is from there"
        require_same_weights(folder, frozen_hashes({"policy": model}))
        restore_weights(copies, state)
    built = policy.build(rollout, model, PolicyContext(copies=copies, microbatch=recipe.microbatch))
    return Writer(built, batch=recipe.eval.batch)


def _restored(parts: PolicyParts, folder: RunFolder | None, *, trained: bool) -> int:
    state = _newest(folder, trained=trained)
    if state is None:
        return 0
    assert folder is not None, "the state is from there"
    require_same_weights(folder, parts.weights())
    restore_weights(parts.copies, state)
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
