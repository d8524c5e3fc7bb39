"""The checks of the machine: installed libraries, the built-in model, the device (of this machine, or a GPU by name), and ranks."""

import hashlib
import json
import os
import platform
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors import SafetensorError

from retouch.config.keys import redacted
from retouch.distributed.ranks import Ranks, init_distributed
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import CPSTransition, DenoisingRollout
from retouch.policies.weights import WeightCopies
from retouch.recipe.recipe import Recipe, load
from retouch.records.folder import RunFolder
from retouch.records.libraries import versions
from retouch.renderers.base import LatentRenderer
from retouch.types import Batch, Sample
from retouch_plan.findings import Finding, failed, gigabytes, note, ok
from retouch_plan.machines import DEFAULT_GPU, MACHINES, Machine, find_machine
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.rewards import PlaygroundReward

PROFILE = ".json"
"""The ending of a file with the measured rates of a GPU (``retouch_plan.machines``)."""
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device with ``bytes`` of memory. ``device`` is None for a GPU of another machine, on which no trial step is possible."""

    name: str
    bytes: int
    device: torch.device | None


def require_known(name: str) -> None:
    """Raise ValueError unless ``name`` is a device in torch's notation, a known GPU, or the file of a GPU's measured profile."""
    if name.endswith(PROFILE):
        find_machine(name)
    elif name not in MACHINES and not _DEVICE.fullmatch(name):
        raise ValueError(
            f"--device {name}: use auto, cpu, mps, cuda or cuda:N for a device of this machine, one of {', '.join(MACHINES)}, or "
            "the JSON file of a measured profile"
        )


def check_device(name: str, *, device: torch.device | None, weights_here: bool) -> tuple[PlannedDevice | None, Finding]:
    """The device that ``name`` means; None if it is not available. ``device``: the device that the rank joined with, if any.
    Without CUDA and without the weights on this machine, ``auto`` means a common GPU, because the run will not take place here."""
    if name.endswith(PROFILE):
        machine = find_machine(name)
        text = f"{machine.name}, {gigabytes(machine.memory)} of memory (not this machine; rates: {machine.measured})"
        return PlannedDevice(machine.name, machine.memory, None), ok("device", text)
    if name in MACHINES:
        memory = MACHINES[name].memory
        return PlannedDevice(name, memory, None), ok("device", f"{name}, {gigabytes(memory)} of memory (not this machine)")
    if name == "auto" and not weights_here and not torch.cuda.is_available():
        text = f"no CUDA device on this machine: checking for {DEFAULT_GPU}; --device chooses another ({', '.join(MACHINES)})"
        return PlannedDevice(DEFAULT_GPU, MACHINES[DEFAULT_GPU].memory, None), note("device", text)
    if device is None:
        try:
            device = init_distributed(name).device
        except ValueError as error:
            return None, failed("device", str(error), fix="--device auto")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        target = PlannedDevice(f"{device} ({properties.name})", properties.total_memory, device)
        used = f", {gigabytes(total - free)} of it in use"
    else:
        target = PlannedDevice(str(device), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), device)
        used = ""
    return target, ok("device", f"{target.name}, {gigabytes(target.bytes)} of memory{used}")


def check_kernels(recipe: Recipe, target: PlannedDevice | None) -> Iterator[Finding]:
    """Check whether the attention backend and quantised layers can train on the device, and blocks can be compiled there."""
    policy = recipe.policy
    chosen = {"policy.model.attention": getattr(policy.model, "attention", "sdpa")} if policy.is_autoregressive else {}
    chosen |= {f"policy.{key}": getattr(policy, key, None) for key in ("attention", "compile")}
    chosen |= {f"policy.base.{part}": bits for part, bits in policy.base or ()}
    named = ", ".join(f"{key} {value}" for key, value in chosen.items() if value not in (None, "sdpa"))
    if target is None:
        return
    attention = getattr(policy, "attention", None) or getattr(policy.model, "attention", "sdpa")
    if attention == "sdpa" and (target.device is None or target.device.type == "cuda"):
        fp32 = getattr(policy.model, "dtype", "float32") == "float32"
        kernel = "memory-efficient attention" if fp32 else "FlashAttention, and memory-efficient attention where there is a mask"
        yield note("kernels", f"attention: torch's {kernel}; cuDNN's, which can crash, only with policy.attention=_native_cudnn")
    if not named:
        return
    if target.device is None:
        yield note("kernels", f"{named}: not tried, because {target.name} is not in this machine")
        return
    try:
        policy.require_kernels(target.device)
    except ValueError as error:
        key = str(error).partition(":")[0]
        yield failed("kernels", str(error), fix=f"--set {key}={'sdpa' if 'model' in key else 'null'}")
    else:
        yield ok("kernels", f"{named}: tried on {target.device}")


def machine_of(target: PlannedDevice, name: str) -> Machine:
    """The machine of a dry run for ``target``. ``name``: the option ``--device``. A device of this machine has the rates of the GPU
    that its name contains; if there is none, those of a common GPU."""
    if name.endswith(PROFILE):
        return find_machine(name)
    if target.device is None:
        return MACHINES[target.name]
    words = target.name.lower()
    like = [each for each in MACHINES.values() if all(part in words for part in each.name.split("-"))]
    base = like[0] if like else MACHINES[DEFAULT_GPU]
    return replace(base, name=target.name, memory=target.bytes, measured=f"rates of {base.name}: {base.measured}")


_LISTED_LIBRARIES = ("torch", "diffusers", "transformers", "peft")
_STEPS = 6
_IMAGES = 16
_BUILD = "retouch tools playground"


def check_install() -> Iterator[Finding]:
    """The versions of Python and of every required library, compared with the metadata of the installed package."""
    supported = SpecifierSet(metadata("retouch")["Requires-Python"])
    yield _check_version("python", platform.python_version(), supported, fix=f"install Python {supported}")
    requirements = [
        each for each in map(Requirement, requires("retouch") or ()) if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    yield from check_versions(requirements)


_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\](?:[^\"'/\\:,\n]+[/\\]+)*(?=[^\s\"'])")


def support_report(given: str | None, overrides: Sequence[str]) -> str:
    """Versions, hardware and the recipe of a run or file, as Markdown. Keys are redacted; of a path, the last name is kept."""
    found = {**versions(Path.cwd()), "CPU": f"{os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found[f"GPU {index}"] = f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB"
    text = "\n".join(f"- {name}: {value}" for name, value in found.items())
    if given is not None and not given.endswith(".py"):
        is_run = Path(given).is_dir()
        recipe = RunFolder(Path(given)).read_recipe()["recipe"] if is_run else load(given, overrides).document()
        text += f"\n\n```json\n{json.dumps(recipe, indent=1)}\n```"
    return _FOLDERS.sub(".../", redacted(text))


def check_versions(requirements: Sequence[Requirement]) -> Iterator[Finding]:
    """One finding for each of the large libraries and each library with a wrong version; one for all others together."""
    rest = 0
    for each in sorted(requirements, key=lambda each: (*(each.name != name for name in _LISTED_LIBRARIES), each.name)):
        name, supported = each.name, each.specifier
        fix = f"pip install --upgrade '{name}{supported}'"
        try:
            finding = _check_version(name, version(name), supported, fix=fix)
        except PackageNotFoundError:
            finding = failed(name, f"not installed; {supported or 'any version'} is supported", fix=fix)
        if name in _LISTED_LIBRARIES or finding.status == "FAILED":
            yield finding
        else:
            rest += 1
    if rest:
        yield ok("libraries", f"{rest} others, all of supported versions")


def _check_version(name: str, installed: str, supported: SpecifierSet, *, fix: str) -> Finding:
    if supported.contains(installed, prereleases=True):
        return ok(name, f"{installed} ({supported or 'any version'})")
    return failed(name, f"{installed} is not supported; {supported} is", fix=fix)


def check_playground(folder: Path) -> Finding:
    """Check on the CPU whether the built-in model in ``folder`` loads, samples with finite log-probabilities, and makes images that
    can be scored."""
    try:
        model = PlaygroundModel(path=str(folder)).build(device=torch.device("cpu"))
        sampling = DenoisingRollout(num_steps=_STEPS, transition=CPSTransition(noise_level=0.7))
        policy = DenoisingPolicy(model, sampling=sampling, eval_steps=_STEPS, microbatch=1, copies=WeightCopies(model.module))
        tasks = tuple(PlaygroundData(count=_IMAGES, complexity={1: 1.0}).tasks(in_turn=True)[:])
        rows = tuple(range(_IMAGES))
        batch = Batch(seed=0, step=0, tasks=tasks, group_ids=rows, group=rows, slot=(0,) * _IMAGES)
        trajectory = policy.rollout(batch)
        images = LatentRenderer(model)(tasks, policy.sample(batch))
        scores = PlaygroundReward()([Sample(task, image) for task, image in zip(tasks, images, strict=True)])
    except (ValueError, OSError, SafetensorError) as error:
        return failed("playground", str(error), fix=_BUILD)
    if None in images or not trajectory.log_probs.isfinite().all():
        return failed("playground", f"the model in {folder} produces values that are not finite", fix=_BUILD)
    mean = scores["overall"].mean().item()
    return ok("playground", f"the built-in model loads and samples; {_IMAGES} simple edits score {mean:.1f} of 10 on average")


_LISTED_DIFFERENCES = 8


@dataclass(frozen=True)
class RankGroup:
    """The ranks, and a gloo process group for texts (None for one rank), which works even if communication between the GPUs
    fails."""

    ranks: Ranks
    group: "dist.ProcessGroup | None" = None

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order. Sent as UTF-8 bytes in a tensor."""
        if self.group is None:
            return [text]
        content = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)[: len(text.encode())]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.world)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self.group)
        longest = int(max(lengths))
        padded = torch.cat([content, content.new_zeros(longest - len(content))])
        all_padded = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(all_padded, padded, group=self.group)
        return [bytes(row[: int(length)].tolist()).decode() for row, length in zip(all_padded, lengths, strict=True)]

    def gather_failures(self, findings: Sequence[Finding]) -> dict[Finding, list[int]]:
        """The failures of all ranks without duplicates, each with the ranks that reported it."""
        texts = self.gather_texts(json.dumps([asdict(finding) for finding in findings if finding.status == "FAILED"]))
        ranks_of: dict[Finding, list[int]] = {}
        for rank, text in enumerate(texts):
            for entry in json.loads(text):
                ranks_of.setdefault(Finding(**entry), []).append(rank)
        return ranks_of


def join_ranks(name: str) -> RankGroup | Finding:
    """Join the process group that the launcher's environment variables describe; a failure if this is not possible. ``name``: of
    the device; for a GPU of another machine, the checks use the device that ``auto`` chooses."""
    try:
        ranks = init_distributed("auto" if name in MACHINES or name.endswith(PROFILE) else name)
        return RankGroup(ranks, None if ranks.world == 1 else dist.new_group(backend="gloo"))
    except dist.DistError as error:
        fix = "start every rank with the same MASTER_ADDR and MASTER_PORT, and open the ports between the machines"
        return failed("rendezvous", str(error), fix=fix)
    except ValueError as error:
        return failed("device", str(error), fix="--device auto")


def check_rank_group(group: RankGroup, recipe: Recipe | None) -> Iterator[Finding]:
    """Run the checks between ranks; all ranks get the same findings. Ends after a failure that would make the next check hang."""
    yield ok("rendezvous", f"{group.ranks.world} rank{'s' * (group.ranks.world > 1)} connected")
    device, name = group.ranks.device, f"{socket.gethostname()} {group.ranks.device}"
    if device.type == "cuda":  # the UUID does not depend on CUDA_VISIBLE_DEVICES
        name += f" {torch.cuda.get_device_properties(device).uuid}"
    devices = check_devices(group.gather_texts(name))
    yield devices
    if devices.status == "FAILED":
        return
    yield check_all_reduce(group.ranks)
    # The platform string contains the kernel's version, which may differ between machines.
    own = {name: number for name, number in versions(Path.cwd()).items() if name != "platform"}
    yield check_same("versions", group.gather_texts(json.dumps(own)))
    if recipe is not None:
        digest = hashlib.sha256(json.dumps(recipe.document(), sort_keys=True).encode()).hexdigest()
        yield check_same("recipe", group.gather_texts(json.dumps({"hash": digest[:16]})))


def check_devices(names: Sequence[str]) -> Finding:
    """Check whether each rank has a CUDA device of its own. ``names``: host name, device and UUID of each rank, in rank order."""
    users: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        users.setdefault(name, []).append(rank)
    shared = {name: ranks for name, ranks in users.items() if "cuda" in name and len(ranks) > 1}
    listed = "\n".join(f"{name}: {rank_list(ranks)}" for name, ranks in (shared or users).items())
    if shared:
        text = f"several ranks use the same device:\n{listed}"
        return failed("devices", text, fix="retouch launch with --nproc at most the number of GPUs, or --gpus to choose them")
    return ok("devices", listed)


def check_all_reduce(ranks: Ranks) -> Finding:
    """Check whether sum, maximum and gather of known values are right on the ranks' devices."""
    values = (ranks.rank + 1) * torch.arange(1.0, 5.0)
    try:
        total, highest, rows = ranks.sum(values), ranks.max(values), ranks.gather(values)
    except dist.DistError as error:
        return failed("all-reduce", str(error).splitlines()[0], fix="NCCL_DEBUG=INFO retouch launch ...")
    base, world = torch.arange(1.0, 5.0), ranks.world
    correct = [
        torch.equal(total, base * (world * (world + 1) / 2)),
        torch.equal(highest, base * world),
        torch.equal(rows, torch.cat([(rank + 1) * base for rank in range(world)])),
    ]
    if not all(correct):
        text = f"wrong result for known values: sum {total.tolist()}, maximum {highest.tolist()}"
        return failed("all-reduce", text, fix="NCCL_DEBUG=INFO retouch launch ...")
    return ok("all-reduce", "sum, maximum and gather of known values are correct")


def check_same(subject: str, documents: Sequence[str]) -> Finding:
    """Check whether all ranks have the same values. ``documents``: a JSON object of texts from each rank, in rank order."""
    by_rank = [json.loads(document) for document in documents]
    names = sorted({name for each in by_rank for name in each})
    differing = [name for name in names if len({each.get(name) for each in by_rank}) > 1]
    if not differing:
        return ok(subject, "the same on all ranks")
    lines = []
    for name in differing[:_LISTED_DIFFERENCES]:
        holders: dict[str, list[int]] = {}
        for rank, each in enumerate(by_rank):
            holders.setdefault(each.get(name) or "none", []).append(rank)
        lines.append(f"{name}: " + "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in holders.items()))
    fix = "start every rank with the same command, from the same environment and the same files"
    return failed(subject, "the ranks differ:\n" + "\n".join(lines), fix=fix)


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
