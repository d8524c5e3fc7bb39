"""Checks that the libraries that Retouch requires are installed, and that the built-in model works."""

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors import SafetensorError

from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import CPSTransition
from retouch.policies.weights import WeightCopies
from retouch.renderers.decoders import LatentRenderer
from retouch.types import Batch, Sample
from retouch_plan.doctor.findings import Finding, failed, ok
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.rewards.edit_judge import PlaygroundReward

_LISTED_LIBRARIES = ("torch", "diffusers", "transformers", "peft")
_STEPS = 6
_IMAGES = 16
_BUILD = "retouch playground build"


def check_install() -> Iterator[Finding]:
    """The versions of Python and of every required library, compared with the metadata of the installed package."""
    supported = SpecifierSet(metadata("retouch")["Requires-Python"])
    yield _check_version("python", platform.python_version(), supported, fix=f"install Python {supported}")
    requirements = [
        each for each in map(Requirement, requires("retouch") or ()) if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    yield from check_versions(requirements)


def check_versions(requirements: Sequence[Requirement]) -> Iterator[Finding]:
    """One finding for each of the large libraries and each library with a wrong version; one for all others together."""
    rest = 0
    for each in sorted(requirements, key=lambda each: (*(each.name != name for name in _LISTED_LIBRARIES), each.name)):
        finding = _check_library(each)
        if each.name in _LISTED_LIBRARIES or finding.status == "FAILED":
            yield finding
        else:
            rest += 1
    if rest:
        yield ok("libraries", f"{rest} others, all of supported versions")


def _check_library(requirement: Requirement) -> Finding:
    name, supported = requirement.name, requirement.specifier
    fix = f"pip install --upgrade '{name}{supported}'"
    try:
        return _check_version(name, version(name), supported, fix=fix)
    except PackageNotFoundError:
        return failed(name, f"not installed; {supported or 'any version'} is supported", fix=fix)


def _check_version(name: str, installed: str, supported: SpecifierSet, *, fix: str) -> Finding:
    if supported.contains(installed, prereleases=True):
        return ok(name, f"{installed} ({supported or 'any version'})")
    return failed(name, f"{installed} is not supported; {supported} is", fix=fix)


def check_playground(folder: Path) -> Finding:
    """Check on the CPU whether the built-in model in ``folder`` loads, samples with finite log-probabilities, and makes images that
    can be scored.
    """
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
