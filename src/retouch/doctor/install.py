"""Is what Retouch stands on installed, and does the built-in model act?"""

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors import SafetensorError

from retouch.doctor.findings import Finding, failed, ok
from retouch.playground.judges.edit_judge import PlaygroundReward
from retouch.playground.models import PlaygroundModel
from retouch.playground.world.tasks import PlaygroundData
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import CPSTransition
from retouch.policies.weights import WeightCopies
from retouch.renderers.decoders import LatentRenderer
from retouch.types import Batch, Sample

_NAMED = ("torch", "diffusers", "transformers", "peft")
_STEPS = 6
_PICTURES = 16
_BUILD = "retouch playground build"


def check_install() -> Iterator[Finding]:
    """Python and every library that the package's own metadata asks for, against the versions that it asks for."""
    asked = SpecifierSet(metadata("retouch")["Requires-Python"])
    yield _compared("python", platform.python_version(), asked, mend=f"install Python {asked}")
    needs = [
        need for need in map(Requirement, requires("retouch") or ()) if need.marker is None or need.marker.evaluate({"extra": ""})
    ]
    yield from check_versions(needs)


def check_versions(needs: Sequence[Requirement]) -> Iterator[Finding]:
    """A line for each of the large libraries and for each other one that is wrong; one for all the rest."""
    rest = 0
    for need in sorted(needs, key=lambda need: (*(need.name != name for name in _NAMED), need.name)):
        finding = _installed(need)
        if need.name in _NAMED or finding.status == "FAILED":
            yield finding
        else:
            rest += 1
    if rest:
        yield ok("libraries", f"{rest} others, of versions that are supported")


def _installed(need: Requirement) -> Finding:
    mend = f"pip install --upgrade '{need.name}{need.specifier}'"
    try:
        return _compared(need.name, version(need.name), need.specifier, mend=mend)
    except PackageNotFoundError:
        return failed(need.name, f"not installed; {need.specifier or 'any version'} is supported", mend=mend)


def _compared(name: str, found: str, asked: SpecifierSet, *, mend: str) -> Finding:
    if asked.contains(found, prereleases=True):
        return ok(name, f"{found} ({asked or 'any version'})")
    return failed(name, f"{found} is not supported; {asked} is", mend=mend)


def check_playground(folder: Path) -> Finding:
    """The built-in model in ``folder`` loads, acts, and makes a few pictures that are judged, on the CPU."""
    try:
        model = PlaygroundModel(path=str(folder)).build(device=torch.device("cpu"))
        sampling = DenoisingRollout(num_steps=_STEPS, transition=CPSTransition(noise_level=0.7))
        policy = DenoisingPolicy(model, sampling=sampling, eval_steps=_STEPS, microbatch=1, copies=WeightCopies(model.module))
        tasks = tuple(PlaygroundData(count=_PICTURES, complexity={1: 1.0}).tasks(in_turn=True)[:])
        rows = tuple(range(_PICTURES))
        batch = Batch(seed=0, step=0, tasks=tasks, group_ids=rows, group=rows, slot=(0,) * _PICTURES)
        acted = policy.rollout(batch)
        images = LatentRenderer(model)(tasks, policy.sample(batch))
        scores = PlaygroundReward()([Sample(task, image) for task, image in zip(tasks, images, strict=True)])
    except (ValueError, OSError, SafetensorError) as error:
        return failed("playground", str(error), mend=_BUILD)
    if None in images or not acted.log_probs.isfinite().all():
        return failed("playground", f"the model in {folder} makes numbers that are not finite", mend=_BUILD)
    mean = scores["overall"].mean().item()
    return ok("playground", f"the built-in model loads and acts; {_PICTURES} simple edits score {mean:.1f} of 10")
