"""`retouch doctor`: all that can be checked before anything expensive starts, as an aligned list that ends with ready or not.

A finding is ok, a note (something to know) or a failure. Under a launcher every rank checks for itself, all agree on the verdict,
and rank 0 says it.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from retouch.distributed.ranks import Ranks
from retouch.doctor.checks import (
    check_batch,
    check_data,
    check_disk,
    check_engines,
    check_folder,
    check_push,
    check_ranks_share,
    check_trackers,
)
from retouch.doctor.device import check_device, local_name, require_known
from retouch.doctor.findings import Finding, failed, note, ok
from retouch.doctor.install import check_install, check_playground
from retouch.doctor.judge import check_reward
from retouch.doctor.memory import check_memory
from retouch.doctor.ranks import Meeting, check_ranks_together, meet, ranks_named
from retouch.doctor.trial import check_trial
from retouch.doctor.writer_memory import check_writing_memory
from retouch.playground.models import playground_weights
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe
from retouch.records.libraries import silence_libraries

_QUICKSTART = ("recipes/quickstart.jsonnet",)


def examine(recipe: Recipe | None, *, distributed: bool, device: str | None, named: Sequence[str] = ()) -> int:
    """Check the installation, and the recipe where one is given; print what was found. Returns 0 when ready, else 1.

    ``distributed``: also what concerns the ranks together, which is done under a launcher in any case. ``device``: a device of this
    machine, or a GPU by name ("h200") to plan for, in place of the recipe's. ``named``: the recipe as the user typed it, file and
    overrides, for the command to type next. ValueError for a device that is not known.
    """
    silence_libraries()
    wanted = device or ("auto" if recipe is None else recipe.device)
    require_known(wanted)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    together = distributed or world > 1
    meeting = _meet(wanted) if together else Meeting(Ranks())
    if isinstance(meeting, Finding):
        report = _Report(named, first=True, world=world)
        report.add([meeting])
        return report.verdict({meeting: [0]}, recipe)
    report = _Report(named, first=meeting.ranks.is_main, world=world if together else None)
    if together:
        report.add(check_ranks_together(meeting, recipe))
    if not meeting.failures(report.found):
        _examine_here(report, meeting, recipe, wanted)
    return report.verdict(meeting.failures(report.found), recipe)


def _meet(wanted: str) -> Meeting | Finding:
    """The ranks; or why they do not come together."""
    if "RANK" not in os.environ:
        return failed(
            "ranks", "this is one process alone, without a launcher", mend="retouch launch --nproc 2 doctor --distributed"
        )
    try:
        return meet(local_name(wanted))
    except dist.DistError as error:
        mend = "start every rank, with one MASTER_ADDR and MASTER_PORT, and with ports open between the machines"
        return failed("rendezvous", str(error), mend=mend)
    except ValueError as error:
        return failed("device", str(error), mend="--device auto")


@dataclass
class _Report:
    """Prints findings as they come, on the first rank. ``world``: ranks that stand already; None where there is no launcher."""

    named: Sequence[str]
    first: bool
    world: int | None
    found: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.found.append(finding)
            self._say(str(finding))

    def verdict(self, failures: dict[Finding, list[int]], recipe: Recipe | None) -> int:
        """The last lines, and the exit code. ``failures``: what failed, and on which ranks."""
        for finding, ranks in failures.items():
            if finding not in self.found:
                self._say(str(failed(finding.subject, f"{ranks_named(ranks)}: {finding.text}", mend=finding.mend)))
        if failures:
            mend = next(iter(failures)).mend
            self._say(f"\nnot ready: {', '.join(dict.fromkeys(finding.subject for finding in failures))}")
            self._say(
                f"next: {shlex.join(['retouch', 'doctor', *self.named])} {mend}" if mend.startswith("--") else f"next: {mend}"
            )
            return 1
        self._say("\nready")
        self._say(f"next: {shlex.join(self._training(recipe))}")
        return 0

    def _training(self, recipe: Recipe | None) -> list[str]:
        """The command that trains: on the ranks that the recipe is meant for, unless these stand already."""
        ranks = self.world or (1 if recipe is None else recipe.ranks or 1)
        words = self.named or (_QUICKSTART if recipe is None else ("RECIPE",))
        return ["retouch", "launch", "--nproc", str(ranks), *words] if ranks > 1 else ["retouch", "train", *words]

    def _say(self, text: str) -> None:
        if self.first:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def _examine_here(report: _Report, meeting: Meeting, recipe: Recipe | None, wanted: str) -> None:
    """What each rank checks for itself, and then, where nothing failed on any of them, the trial step of all."""
    report.add(check_install())
    if recipe is None:
        report.add([check_playground(playground_weights())])
        return
    device = _examine_recipe(report, meeting, recipe, wanted)
    can_try = meeting.texts("" if device is None else str(device))
    if meeting.failures(report.found) or "" in can_try:
        return
    assert device is not None
    report.add(check_trial(recipe, Ranks(rank=meeting.ranks.rank, world=meeting.ranks.world, device=device)))


def _examine_recipe(report: _Report, meeting: Meeting, recipe: Recipe, wanted: str) -> torch.device | None:
    """The checks that load no weights. Returns the device to try a step on; None where there is nothing to try it with."""
    world = report.world or recipe.ranks or 1
    report.add(check_batch(recipe, world=world))
    report.add(check_ranks_share(recipe, world=world))
    report.add([check_trackers(recipe), *check_push(recipe), check_folder(recipe)])
    sets = None
    for finding, read in check_data(recipe):
        report.add([finding])
        sets = sets or read
    report.add(check_reward(recipe, sets))
    report.add(check_engines(recipe))
    try:
        folder, weights_here = _weights(recipe)
    except ValueError as error:
        report.add([failed("weights", str(error), mend="--set policy.model.path=FOLDER")])
        return None
    joined = None if report.world is None else meeting.ranks.device
    place, finding = check_device(wanted, device=joined, weights_here=weights_here)
    report.add([finding])
    if isinstance(recipe.policy, DenoisingPolicyKeys):
        finding, checkpoint = check_memory(recipe, folder, place)
        findings = [finding]
    else:
        findings, checkpoint = check_writing_memory(recipe, folder, place)
    report.add(findings)
    if checkpoint is not None:
        report.add([check_disk(recipe, checkpoint)])
    report.add([_where(recipe, folder, weights_here)])
    return place.device if weights_here and place is not None else None


def _weights(recipe: Recipe) -> tuple[Path | None, bool]:
    """The folder of the image model's weights if it has one, and whether all weights are here. ValueError: there can be none."""
    folder, here = recipe.image_model.find_weights()
    return folder, here and recipe.policy.model.find_weights()[1]


def _where(recipe: Recipe, folder: Path | None, weights_here: bool) -> Finding:
    source = recipe.image_model.source
    if not weights_here and not recipe.policy.model.find_weights()[1]:
        source = recipe.policy.model.source
    if not weights_here:
        return note("weights", f"the weights of {source} are not on this machine: they would be downloaded when training starts")
    if folder is None:
        return ok("weights", f"loaded by {source}")
    return ok("weights", str(folder))
