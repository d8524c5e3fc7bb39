"""The memory plan of each device of a run with a language-model policy, from the configurations of writer and image model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.value_head import saved_of_head, with_head
from retouch.doctor.device import GPUS, PlannedDevice, device_of_part
from retouch.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch.doctor.memory import FREE, TABLE_FROM_BYTES, UNDECIDED, describe, saved_bytes, table
from retouch.doctor.reward_memory import reward_rows, uncounted_rewards
from retouch.doctor.rows import held_out_rows, rank_rows
from retouch.doctor.writer_setup import codes_setup, image_batch, writer_setup
from retouch.memory.images import codes_plan, image_model_plan
from retouch.memory.plan import MemoryPlan, MemoryRow, moment_bytes, surely_fits
from retouch.memory.sizes import lora_count, parameter_count, stored_count
from retouch.memory.tokens import prefill_bytes, writer_plan
from retouch.models import train as recipe_train
from retouch.models.base import DiffusersModel
from retouch.models.language import PretrainedLanguageModel
from retouch.models.shapes import PartConfigs
from retouch.recipe.derived.out_of_memory import suggestions
from retouch.recipe.devices import Devices
from retouch.recipe.policy import AutoregressivePolicyKeys
from retouch.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The memory plan of one device, and the parts of the run (policy, renderer, reward) on it.

    ``offloaded``: bytes of weights that are on the device only while they are used (``devices.offload``). ``total_with_offload``:
    the plan's total if ``devices.offload`` were set.
    """

    device: str
    parts: tuple[str, ...]
    plan: MemoryPlan
    offloaded: int
    total_with_offload: int


def check_writer_memory(recipe: Recipe, folder: Path | None, target: PlannedDevice | None) -> tuple[list[Finding], int | None]:
    """Check whether each device has enough memory for its plan, and the bytes of a checkpoint.

    ``folder``: the folder of the image model; None if it is not on this machine. ``target``: the device of the policy; None if it
    is not available."""
    policy = recipe.policy
    assert isinstance(policy, AutoregressivePolicyKeys)
    try:
        described = describe(recipe, folder)
        model = policy.model
        policy_parts = described if recipe.image_model is model else model.describe(model.find_weights()[0])
        writer = None if policy_parts is None else policy_parts["writer"]
        if described is None or writer is None:
            unknown = "the writer" if writer is None else "the image model"
            return [note("memory", f"the configuration of {unknown} is not known, so the run's memory is not planned")], None
        plans = list(device_plans(recipe, writer, described))
        counts = {"writer": writer} | dict(described)
    except ValueError as error:
        return [failed("memory", str(error), fix="correct policy.model, policy.train and renderer.model")], None
    sizes = ", ".join(f"{name} {stored_count(part) / 1e9:.2f} B" for name, part in counts.items())
    policy_plan, *others = plans
    findings = [_fits(recipe, policy_plan, sizes, target)]
    findings += [_fits(recipe, each, sizes, None if target is None else device_of_part(each.device, target)) for each in others]
    if names := uncounted_rewards(recipe.reward):
        findings.append(note("memory", f"not counted, because their configuration is not known: the models of {', '.join(names)}"))
    findings += _cpu_memory(recipe, sum(stored_count(part) for part in described.values()) * _image_dtype(recipe).itemsize)
    if waiting := _waiting(recipe, policy, writer, described):
        findings.append(
            note("memory", f"{gigabytes(waiting)} of the writer's training state in CPU memory, for each rank of the machine")
        )
    return findings, _checkpoint_bytes(recipe, policy, writer)


def _cpu_memory(recipe: Recipe, weights: int) -> list[Finding]:
    """CPU memory for the weights of the image model: always with ``devices.offload``, or only while it is loaded."""
    if weights < TABLE_FROM_BYTES:
        return []
    if recipe.devices is not None and recipe.devices.offload:
        return [note("memory", f"{gigabytes(weights)} of offloaded weights in CPU memory, for each rank of the machine")]
    if recipe.renderer is not None and recipe.renderer.loads_on_cpu:
        return [note("memory", f"loading takes {gigabytes(weights)} of CPU memory, for each rank of the machine")]
    return []


def _waiting(recipe: Recipe, policy: AutoregressivePolicyKeys, writer: Mapping[str, Any], described: PartConfigs) -> int:
    """Bytes of the training state (weights, copies, gradients, moments) in CPU memory, with ``devices.weights``."""
    setup = writer_setup(recipe, policy, described)
    if not setup.weights_on_cpu:
        return 0
    all_here, here = (writer_plan(writer, each).rows for each in (replace(setup, weights_on_cpu=False, moments=None), setup))
    return sum(row.bytes for row in all_here) - sum(row.bytes for row in here)


def device_plans(recipe: Recipe, writer: Mapping[str, Any], described: PartConfigs) -> Iterator[DevicePlan]:
    """A plan for each device, the policy's first."""
    policy, renderer = recipe.policy, recipe.renderer
    assert isinstance(policy, AutoregressivePolicyKeys)
    assert renderer is not None
    devices = recipe.devices or Devices()
    policy_device, renderer_device = devices.policy or recipe.device, devices.renderer or devices.policy or recipe.device
    setup = writer_setup(recipe, policy, described)
    for_policy = with_head(writer_plan(writer, setup), recipe, _hidden_size(writer))
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
        encoder = writer if shared else described["text_encoder"]
        encoding = MemoryRow("encoding of responses", prefill_bytes(encoder, tokens, setup.dtype))
        if shared:
            for_policy = MemoryPlan(for_policy.rows, (*for_policy.phases, encoding))
        else:
            for_renderer = MemoryPlan(for_renderer.rows, (*for_renderer.phases, encoding))
    weights = sum(row.bytes for row in for_renderer.rows)
    offloading = MemoryPlan((), tuple(MemoryRow(f"{row.name}, with weights", row.bytes + weights) for row in for_renderer.phases))
    if devices.offload:
        for_renderer = offloading
    parts: dict[str, list[tuple[str, MemoryPlan]]] = {policy_device: [("policy", for_policy)]}
    parts.setdefault(renderer_device, []).append(("renderer", for_renderer))
    for device, row in reward_rows(recipe.reward, device=devices.reward or policy_device):
        parts.setdefault(device, []).append(("reward", MemoryPlan((row,))))
    for device, on_device in parts.items():
        rows_kept = tuple(row for _, plan in on_device for row in plan.rows)
        phases = tuple(phase for _, plan in on_device for phase in plan.phases)
        names = tuple(dict.fromkeys(part for part, _ in on_device))
        renders = device == renderer_device
        offloaded = weights if devices.offload and renders else 0
        saved = sum(row.bytes for row in for_renderer.rows) if renders else 0
        with_offload = MemoryPlan(rows_kept, (*phases, *offloading.phases) if renders else phases)
        plan = MemoryPlan(rows_kept, phases)
        yield DevicePlan(device, names, plan, offloaded=offloaded, total_with_offload=with_offload.total - saved)


def _fits(recipe: Recipe, planned: DevicePlan, sizes: str, target: PlannedDevice | None) -> Finding:
    plan, parts = planned.plan, ", ".join(planned.parts)
    need, do = ("need", "do") if len(planned.parts) > 1 else ("needs", "does")
    lines = "\n".join(["", *table(plan, target, f"parameters: {sizes}")]) if plan.total >= TABLE_FROM_BYTES else ""
    on_each = f", on each of {recipe.ranks} ranks" if recipe.ranks is not None and recipe.ranks > 1 else ""
    if target is None:
        return note("memory", f"{parts} {need} {gigabytes(plan.total)} on {planned.device}{on_each}{lines}")
    needed = f"{gigabytes(plan.total)} of the {gigabytes(target.bytes)} of {_device_label(planned.device, target)}{on_each}"
    if plan.total > target.bytes:
        lower = [each for stage in ("update", "rollout", "render", "evaluation") for each in suggestions(recipe, stage)]
        settings = f"\nsettings that need less: {' '.join(f'--set {each}' for each in dict.fromkeys(lower))}" if lower else ""
        return failed(
            "memory",
            f"{parts} {do} not fit: {needed}{FREE}{lines}{settings}",
            fix=_suggested_fix(recipe, planned, target),
        )
    if not surely_fits(plan.total, target.bytes):
        return note("memory", f"{parts} may not fit: {needed}{UNDECIDED}{lines}")
    return ok("memory", f"{parts} {need} {needed}{lines}")


def _device_label(device: str, target: PlannedDevice) -> str:
    return target.name if device in ("auto", target.name) or target.device is not None else f"{target.name} ({device})"


def _suggested_fix(recipe: Recipe, planned: DevicePlan, target: PlannedDevice) -> str:
    """The change that helps most: a setting for the largest phase if that may suffice, otherwise a larger device or sharding."""
    kept = sum(row.bytes for row in planned.plan.rows) + planned.offloaded
    most = max(planned.plan.phases, key=lambda row: row.bytes, default=MemoryRow("nothing", 0))
    if kept < target.bytes:
        if most.name.startswith("update") and not recipe.policy.gradient_checkpointing:
            return "--set policy.gradient_checkpointing=true"
        if planned.total_with_offload <= target.bytes:
            return "--set devices.offload=true"
        if most.name.startswith("update") and recipe.microbatch > 1:
            return "--set microbatch=1"
        if most.name.startswith("rollout") and recipe.rollout.chunk > 1:
            return f"--set rollout.chunk={max(1, recipe.rollout.chunk // 4)}"
        if most.name.startswith("evaluation") and recipe.eval.batch > 1:
            return f"--set eval.batch={max(1, held_out_rows(recipe) // 4)}"
        if most.name.startswith("rendering") and recipe.renderer is not None and recipe.renderer.batch > 1:
            return "--set renderer.batch=1"
    larger = next((name for name, size in reversed(GPUS.items()) if size > max(target.bytes, planned.plan.total)), None)
    return "--set sharding=fsdp2" if larger is None else f"--device {larger}"


def _checkpoint_bytes(recipe: Recipe, policy: AutoregressivePolicyKeys, writer: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint: trained weights, their copies, AdamW's moments, and the value head."""
    assert isinstance(policy.model, PretrainedLanguageModel)
    if isinstance(policy.train, recipe_train.Lora):
        count = lora_count(writer, rank=policy.train.rank, targets=lora_targets(policy))
    else:
        count = parameter_count(writer)
    dtype = DTYPES[policy.train.trained_dtype(policy.model.dtype)]
    masters = torch.float32.itemsize if dtype.itemsize < torch.float32.itemsize else 0
    head = saved_of_head(with_head(MemoryPlan(()), recipe, _hidden_size(writer)))
    moments = moment_bytes(count, recipe.optimizer.moments, saved=True)
    return count * (saved_bytes(recipe, dtype) + masters) + moments + head


def _hidden_size(writer: Mapping[str, Any]) -> int:
    """Width of the writer's hidden states."""
    config = writer["config"]
    return int((config.get("text_config") or config)["hidden_size"])


def _image_dtype(recipe: Recipe) -> torch.dtype:
    """The dtype of the image model's weights."""
    model = recipe.image_model
    assert isinstance(model, DiffusersModel | PretrainedLanguageModel)
    return DTYPES[model.dtype]
