"""The trial step: load the model and try one step of each phase, as a run does at its start. No reward is computed and nothing is
saved."""

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from safetensors import SafetensorError

from retouch.config.imports import is_user_error
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import Recipe
from retouch.rewards.judging import ScoredBatch
from retouch.run.build import Assembly, assemble
from retouch.types import Batch, Sample
from retouch_plan.doctor import checks
from retouch_plan.doctor.findings import Finding, failed, gigabytes, ok


def check_trial(recipe: Recipe, ranks: Ranks, *, steps: Sequence[int] | None = None, check_disk: bool = False) -> Iterator[Finding]:
    """Load the model, try one step of each phase, and report the peak memory. Collective: every rank must call it.

    ``check_disk``: also check whether the disk has room for the checkpoints of ``steps`` steps per phase (``phase_steps``).
    """
    smaller = "--set microbatch=1" if recipe.microbatch > 1 else "--set policy.gradient_checkpointing=true"
    try:
        parts = assemble(recipe, ranks)
    except (ValueError, OSError, SafetensorError) as error:
        key = re.match(r"[a-z_]+(\.[a-z_]+)+(?=: )", str(error))
        yield failed("model", str(error), fix=f"correct {key[0] if key else 'policy.model'}")
        return
    except torch.OutOfMemoryError as error:
        yield failed("model", f"{ranks.device} is full before the first step: {error}", fix="use a device with more memory")
        return
    try:
        yield _loaded(parts)
        if check_disk:
            yield checks.check_disk(recipe, _checkpoint_bytes(parts), steps=steps)
        for check in parts.trial_steps(stepper=parts.stepper(), judge=_no_scores, done=0):
            yield (
                ok("trial step", check.text)
                if check.ok
                else failed("trial step", check.text, fix=_suggested_fix(recipe, check.name))
            )
    except ValueError as error:
        if not is_user_error(error):
            raise
        yield failed("trial step", str(error), fix="correct the recipe as the message says")
    except torch.OutOfMemoryError as error:
        yield failed("trial step", f"{ranks.device} is full: {error}", fix=smaller)
    finally:
        parts.judge.close()
    if ranks.device.type == "cuda":
        yield ok("measured", f"at most {gigabytes(torch.cuda.max_memory_allocated(ranks.device))} in use on {ranks.device}")


def _loaded(parts: Assembly) -> Finding:
    weights = list(parts.model.module.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    total = sum(weight.numel() for weight in weights)
    return ok("model", f"loaded on {parts.ranks.device}: {trained / 1e6:.2f} M of {total / 1e6:.2f} M parameters are trained")


def _checkpoint_bytes(parts: Assembly) -> int:
    """The bytes of a checkpoint: trained weights, their copies, fp32 master weights of weights in 16 bits, and AdamW's two moments.
    Moments in 8 bits are counted as fp32."""
    trained = parts.copies.parameters.values()
    copies = [weight for copy in parts.copies.copies.values() for weight in copy.values()]
    size = sum(weight.numel() * weight.element_size() for weight in (*trained, *copies))
    return size + sum(weight.numel() * (8 if weight.element_size() == 4 else 12) for weight in trained)


def _suggested_fix(recipe: Recipe, check: str) -> str:
    """What to do about a failed check of the trial step: overrides that can be typed where the recipe can be the cause."""
    lora = recipe.policy.train.lora
    key = "policy.train.targets" if lora is recipe.policy.train else "policy.train.lora.targets"
    targets = [] if lora is None or lora.targets is None else [f"--set {key}=null"]
    match check:
        case "ratio_before":  # without rounding to 16 bits
            return "--set policy.model.dtype=float32"
        case "moved" | "ratio_after":
            phases = enumerate(recipe.resolved_phases())
            rates = {recipe.phase_key(index, "learning_rate"): phase.learning_rate for index, phase in phases}
            return " ".join([*targets, *(f"--set {key}={10 * rate:g}" for key, rate in rates.items())])
        case "frozen":
            return "correct the model: its forward pass writes to weights that are not trained"
        case _:  # a gradient of 0
            return " ".join(targets) or "correct the model: its outputs do not depend on the trained weights"


def _no_scores(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
    raise AssertionError("a trial step computes no reward")
