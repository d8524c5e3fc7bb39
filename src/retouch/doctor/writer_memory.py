"""What a run whose policy writes keeps on each of its devices, planned from the configurations of writer and image model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.phases import copies_needed
from retouch.assembly.value_head import saved_of_head, with_head
from retouch.doctor.device import CARDS, Place, place_of
from retouch.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch.doctor.judge_memory import judge_rows, uncounted
from retouch.doctor.memory import LEFT_FREE, SHOWN_FROM, describe, table
from retouch.doctor.writer_setup import codes_setup, held_out_rows, image_batch, rank_rows, writing_setup
from retouch.memory.images import codes_plan, image_model_plan
from retouch.memory.plan import MemoryPlan, MemoryRow
from retouch.memory.sizes import lora_count, parameter_count, stored_count
from retouch.memory.tokens import reading_bytes, writer_plan
from retouch.models import train as recipe_train
from retouch.models.base import Described, DiffusersModel
from retouch.models.language import PretrainedLanguageModel
from retouch.recipe.devices import Devices
from retouch.recipe.out_of_memory import suggestions
from retouch.recipe.policy import AutoregressivePolicyKeys
from retouch.recipe.recipe import Recipe

_ADAMW_BYTES = 8


@dataclass(frozen=True, slots=True)
class Planned:
    """What lies on the device of one name, and which parts of the run these are.

    ``lent``: bytes of weights that come and go, all of them at once. ``in_turn``: what the whole comes to with ``devices.offload``.
    """

    device: str
    parts: tuple[str, ...]
    plan: MemoryPlan
    lent: int
    in_turn: int


def check_writing_memory(recipe: Recipe, folder: Path | None, place: Place | None) -> tuple[list[Finding], int | None]:
    """Whether each device holds what is planned for it, and the bytes of a checkpoint. ``folder``: where the image model lies."""
    policy = recipe.policy
    assert isinstance(policy, AutoregressivePolicyKeys)
    try:
        described = describe(recipe, folder)
        model = policy.model
        of_policy = described if recipe.image_model is model else model.describe(model.find_weights()[0])
        written = None if of_policy is None else of_policy["writer"]
        if described is None or written is None:
            of = "the writer" if written is None else "the image model"
            return [note("memory", f"no configuration of {of} is known here, so the run's memory is not planned")], None
        planned = list(plans(recipe, written, described))
        counts = {"writer": written} | dict(described)
    except ValueError as error:
        return [failed("memory", str(error), mend="mend what policy.model, policy.train and renderer.model name")], None
    sizes = ", ".join(f"{name} {stored_count(part) / 1e9:.2f} B" for name, part in counts.items())
    findings = [_fits(recipe, each, sizes, None if place is None else place_of(each.device, place)) for each in planned]
    if names := uncounted(recipe.reward):
        findings.append(note("memory", f"not counted, for want of a known configuration: the models of {', '.join(names)}"))
    findings += _in_cpus_memory(recipe, sum(stored_count(part) for part in described.values()) * _image_dtype(recipe).itemsize)
    return findings, _checkpoint(recipe, policy, written)


def _in_cpus_memory(recipe: Recipe, weights: int) -> list[Finding]:
    """What the image model takes of it: all the time where it waits there, and while it is loaded before an editor's writer."""
    if weights < SHOWN_FROM:
        return []
    if recipe.devices is not None and recipe.devices.offload:
        return [note("memory", f"{gigabytes(weights)} wait in the CPU's memory, for each rank of the machine")]
    if recipe.renderer is not None and recipe.renderer.loads_on_cpu:
        return [note("memory", f"loading takes {gigabytes(weights)} of the CPU's memory, for each rank of the machine")]
    return []


def plans(recipe: Recipe, written: Mapping[str, Any], described: Described) -> Iterator[Planned]:
    """A plan for each device, the policy's first."""
    policy, renderer = recipe.policy, recipe.renderer
    assert isinstance(policy, AutoregressivePolicyKeys)
    assert renderer is not None
    devices = recipe.devices or Devices()
    mine, theirs = devices.policy or recipe.device, devices.renderer or devices.policy or recipe.device
    setup = writing_setup(recipe, policy, described)
    for_policy = with_head(writer_plan(written, setup), recipe, _width(written))
    shared = renderer.policy_encodes
    if renderer.image_model is None:
        assert isinstance(policy.model, PretrainedLanguageModel)
        for_renderer = codes_plan(described["autoencoder"], **codes_setup(recipe, policy.model))
    else:
        assert isinstance(renderer.image_model, DiffusersModel)
        batch = image_batch(recipe, renderer.image_model, setup)
        for_renderer = image_model_plan(renderer.image_model, described, batch, without=("text_encoder",) if shared else ())
    if renderer.responses_at_once is not None:
        rows = min(renderer.responses_at_once, max(rank_rows(recipe), held_out_rows(recipe)))
        tokens = rows * (setup.prompt + setup.completion)
        encoder = written if shared else described["text_encoder"]
        reading = MemoryRow("reading responses", reading_bytes(encoder, tokens, setup.dtype))
        if shared:
            for_policy = MemoryPlan(for_policy.rows, (*for_policy.phases, reading))
        else:
            for_renderer = MemoryPlan(for_renderer.rows, (*for_renderer.phases, reading))
    weights = sum(row.bytes for row in for_renderer.rows)
    waiting = MemoryPlan((), tuple(MemoryRow(f"{row.name}, its weights lent", row.bytes + weights) for row in for_renderer.phases))
    if devices.offload:
        for_renderer = waiting
    placed: dict[str, list[tuple[str, MemoryPlan]]] = {mine: [("policy", for_policy)]}
    placed.setdefault(theirs, []).append(("renderer", for_renderer))
    for device, row in judge_rows(recipe.reward, device=devices.reward or mine):
        placed.setdefault(device, []).append(("reward", MemoryPlan((row,))))
    for device, lying in placed.items():
        kept = tuple(row for _, plan in lying for row in plan.rows)
        in_turn = tuple(phase for _, plan in lying for phase in plan.phases)
        names = tuple(dict.fromkeys(part for part, _ in lying))
        lent = weights if devices.offload and device == theirs else 0
        saved = sum(row.bytes for row in for_renderer.rows) if device == theirs else 0
        turns = MemoryPlan(kept, (*in_turn, *waiting.phases) if device == theirs else in_turn)
        yield Planned(device, names, MemoryPlan(kept, in_turn), lent=lent, in_turn=turns.total - saved)


def _fits(recipe: Recipe, planned: Planned, sizes: str, place: Place | None) -> Finding:
    plan, parts = planned.plan, ", ".join(planned.parts)
    need, fit, do = ("need", "fit", "do") if len(planned.parts) > 1 else ("needs", "fits", "does")
    lines = "\n".join(["", *table(plan, place, f"parameters: {sizes}")]) if plan.total >= SHOWN_FROM else ""
    on_each = f", on each of {recipe.ranks} ranks" if recipe.ranks is not None and recipe.ranks > 1 else ""
    if place is None:
        return note("memory", f"{parts} {need} {gigabytes(plan.total)} on {planned.device}{on_each}{lines}")
    needed = f"{gigabytes(plan.total)} of the {gigabytes(place.bytes)} of {_called(planned.device, place)}{on_each}"
    if plan.total > place.bytes:
        lower = [each for stage in ("update", "rollout", "render", "evaluation") for each in suggestions(recipe, stage)]
        less = f"\nless at once takes less: {' '.join(f'--set {each}' for each in dict.fromkeys(lower))}" if lower else ""
        return failed(
            "memory",
            f"{parts} {do} not fit: {needed}{lines}{less}",
            mend=_mend(recipe, planned, place),
        )
    if plan.total > (1 - LEFT_FREE) * place.bytes:
        return note("memory", f"{parts} {fit} narrowly: {needed}, and a tenth should be free{lines}")
    return ok("memory", f"{parts} {need} {needed}{lines}")


def _called(device: str, place: Place) -> str:
    return place.name if device in ("auto", place.name) or place.device is not None else f"{place.name} ({device})"


def _mend(recipe: Recipe, planned: Planned, place: Place) -> str:
    """The one change that helps most: what takes turns made smaller while that can be enough, else weights put elsewhere."""
    kept = sum(row.bytes for row in planned.plan.rows) + planned.lent
    most = max(planned.plan.phases, key=lambda row: row.bytes, default=MemoryRow("nothing", 0))
    if kept < place.bytes:
        if most.name.startswith("an update") and not recipe.policy.gradient_checkpointing:
            return "--set policy.gradient_checkpointing=true"
        if planned.in_turn <= place.bytes:
            return "--set devices.offload=true"
        if most.name.startswith("an update") and recipe.microbatch > 1:
            return "--set microbatch=1"
        if most.name.startswith("a rollout") and recipe.rollout.chunk > 1:
            return f"--set rollout.chunk={max(1, recipe.rollout.chunk // 4)}"
        if most.name.startswith("an evaluation") and recipe.eval.batch > 1:
            return f"--set eval.batch={max(1, held_out_rows(recipe) // 4)}"
        if most.name.startswith("drawing") and recipe.renderer is not None and recipe.renderer.batch > 1:
            return "--set renderer.batch=1"
    larger = next((name for name, size in reversed(CARDS.items()) if size > max(place.bytes, planned.plan.total)), None)
    return "--set sharding=fsdp2" if larger is None else f"--device {larger}"


def _checkpoint(recipe: Recipe, policy: AutoregressivePolicyKeys, written: Mapping[str, Any]) -> int:
    """Bytes of one: weights that train, their copies, and AdamW's moments."""
    assert isinstance(policy.model, PretrainedLanguageModel)
    if isinstance(policy.train, recipe_train.Lora):
        count = lora_count(written, rank=policy.train.rank, targets=lora_targets(policy))
        size = torch.float32.itemsize
    else:
        count, size = parameter_count(written), DTYPES[policy.model.dtype].itemsize
    head = saved_of_head(with_head(MemoryPlan(()), recipe, _width(written)))
    return count * ((1 + len(copies_needed(recipe))) * size + _ADAMW_BYTES) + head


def _width(written: Mapping[str, Any]) -> int:
    """Numbers of a state."""
    config = written["config"]
    return int((config.get("text_config") or config)["hidden_size"])


def _image_dtype(recipe: Recipe) -> torch.dtype:
    """Of the image model's weights."""
    model = recipe.image_model
    assert isinstance(model, DiffusersModel | PretrainedLanguageModel)
    return DTYPES[model.dtype]
