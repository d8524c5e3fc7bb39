"""`retouch doctor`: all checks that need no long computation, printed as an aligned list that ends with ready or not ready.

A finding is ok, a note or a failure. Under a launcher, every rank runs the checks, the ranks exchange their failures, and rank 0
prints the result.
"""

import os
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from retouch.distributed.ranks import Ranks
from retouch.models.base import SINGLE_FILES
from retouch.models.pretrained import DENOISER, MODEL, IncompleteWeights, find_weights, require_complete
from retouch.recipe.recipe import Recipe, parse
from retouch.records.libraries import silence_libraries
from retouch.run.build import teachers
from retouch.trainer.trainer import Trainer
from retouch_judge.calls import Calls
from retouch_plan.checks import (
    calls_of,
    check_batch,
    check_data,
    check_disk,
    check_engines,
    check_folder,
    check_prompt_embeddings,
    check_push,
    check_reward,
    check_sharding_settings,
    check_trackers,
    check_trial,
    future_weights,
    phase_steps,
)
from retouch_plan.findings import Finding, failed, note, ok
from retouch_plan.machines import DEFAULT_GPU, MACHINES
from retouch_plan.system import (
    PlannedDevice,
    RankGroup,
    check_device,
    check_install,
    check_kernels,
    check_playground,
    check_rank_group,
    join_ranks,
    machine_of,
    rank_list,
    require_known,
)
from retouch_worlds.playground import playground_weights

_QUICKSTART = ("recipes/quickstart.jsonnet",)
_LARGE = 10**9
"""A dry run is made for the CPU if the weights have at least this many bytes. With fewer, the trial step shows that they fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What the user asks `retouch doctor` for, besides the checks of a recipe.

    ``device``: check for this device instead of the recipe's: a device of this machine, the name of a GPU ("h200"), or the file of
    a GPU's measured profile. ``base``: folder or Hugging Face id of a model with the size of weights that do not exist yet.
    ``dry_run``: make a dry run of a step for its memory and time. ``estimate``: also for a recipe for the CPU, on a common GPU.
    ``price``: dollars per hour of one GPU.
    """

    device: str | None = None
    base: str | None = None
    dry_run: bool = True
    estimate: bool = False
    price: float | None = None

    def words(self) -> list[str]:
        """Return the same options as words of the command line of `retouch doctor`."""
        named = {
            "--device": self.device,
            "--base": self.base,
            "--price-per-hour": None if self.price is None else f"{self.price:g}",
        }
        given = [f"{option} {shlex.quote(value)}" for option, value in named.items() if value is not None]
        flags = {"--no-rehearsal": not self.dry_run, "--estimate": self.estimate and self.price is None}
        return [*given, *(flag for flag, chosen in flags.items() if chosen)]


def check_trainer(recipe: Recipe, device: str, *, command: str, chosen: Sequence[str]) -> bool:
    """Check the run of a ``Trainer`` and print the findings. Returns whether it is ready. ``command``: starts the run. ``chosen``:
    the settings that depend on the model and the device."""
    for line in chosen:
        sys.stdout.write(f"{note('settings', line)}\n")
    return run_checks(recipe, distributed=False, options=DoctorOptions(device=device), command=command) == 0


class _Trains(BaseException):
    """Ends a script at its first call of ``train``. Not an Exception, so that the script does not catch it."""


def check_script(script: str, *, device: str | None) -> bool:
    """Run a script up to the point where its ``Trainer`` trains, and check that run (``Trainer.doctor``). Returns whether it is
    ready. Raises ValueError if there is no such script, or if it trains nothing."""
    found: list[Trainer] = []

    def stop(trainer: Trainer, **_: Any) -> None:
        found.append(trainer)
        raise _Trains

    if not Path(script).is_file():
        raise ValueError(f"{script}: there is no such file")
    with patch.object(Trainer, "steps", stop), patch.object(sys, "argv", [script]), suppress(_Trains):
        runpy.run_path(script, run_name="__main__")
    if not found:
        raise ValueError(f"{script}: it ended without a call of Trainer.train(), so there is nothing to check")
    return found[0].doctor(device, command=f"python {shlex.quote(script)}")


def run_checks(
    recipe: Recipe | None,
    *,
    distributed: bool,
    options: DoctorOptions,
    arguments: Sequence[str] = (),
    command: str | None = None,
) -> int:
    """Check the installation, and the recipe if there is one; print the findings. Returns the exit code: 0 if ready, else 1.

    ``distributed``: also check communication between the ranks; under a launcher this is always done. ``arguments``: the recipe as
    the user typed it, file and overrides, for the suggested next command. ``command``: the next command, if it is another one.
    Raises ValueError for an unknown device.
    """
    silence_libraries()
    device_name = options.device or ("auto" if recipe is None else recipe.device)
    require_known(device_name)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    launched = distributed or world > 1
    group: RankGroup | Finding = RankGroup(Ranks())
    if launched and "RANK" not in os.environ:
        fix = "retouch launch --nproc 2 doctor --distributed"
        group = failed("ranks", "this is a single process without a launcher", fix=fix)
    elif launched:
        group = join_ranks(device_name)
    if isinstance(group, Finding):
        report = _Report(arguments, options.words(), is_main=True, world=world, command=command)
        report.add([group])
        return report.finish({group: [0]}, recipe)
    report = _Report(arguments, options.words(), is_main=group.ranks.is_main, world=world if launched else None, command=command)
    if launched:
        report.add(check_rank_group(group, recipe))
    if not group.gather_failures(report.found):
        report.add(check_install())
        if recipe is None:
            report.add([check_playground(playground_weights())])
        else:
            _check_recipe(report, group, recipe, device_name, options)
    return report.finish(group.gather_failures(report.found), recipe)


@dataclass
class _Report:
    """Prints findings as they arrive, on the first rank. ``arguments``: the recipe as the user typed it. ``options``: the other
    options of `retouch doctor`, for a suggestion to call it again. ``world``: number of launched ranks; None without a launcher."""

    arguments: Sequence[str]
    options: Sequence[str]
    is_main: bool
    world: int | None
    command: str | None = None
    found: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.found.append(finding)
            self._print(str(finding))

    def finish(self, failures: dict[Finding, list[int]], recipe: Recipe | None) -> int:
        """Print the last lines and return the exit code. ``failures``: each failure with the ranks that had it."""
        for finding, ranks in failures.items():
            if finding not in self.found:
                self._print(str(failed(finding.subject, f"{rank_list(ranks)}: {finding.text}", fix=finding.fix)))
        if failures:
            self._print(f"\nnot ready: {', '.join(dict.fromkeys(finding.subject for finding in failures))}")
            for step in next_steps(failures, self.arguments, self.options, script=self.command is not None):
                self._print(f"next: {step}")
            return 1
        self._print("\nready")
        count = self.world or (1 if recipe is None else recipe.ranks or 1)
        words = self.arguments or (_QUICKSTART if recipe is None else ("RECIPE",))
        command = ["launch", "--nproc", str(count)] if count > 1 else ["train"]
        self._print(f"next: {self.command or shlex.join(['retouch', *command, *words])}")
        return 0

    def _print(self, text: str) -> None:
        if self.is_main:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()


def next_steps(
    failures: Iterable[Finding], arguments: Sequence[str], options: Sequence[str] = (), *, script: bool = False
) -> Iterator[str]:
    """Yield what to do: the commands for the failures, and last this command with all options that the failures need. ``options``:
    the options of this command besides ``arguments``; an option that a failure needs replaces the given one. ``script``: a script
    makes the run, so keys are set in its ``Trainer``."""
    failures = list(failures)
    options_of = [option for failure in failures for option in (failure.fix, failure.then)]
    needed = dict.fromkeys(option for option in options_of if option.startswith("--"))
    for fix in dict.fromkeys(failure.fix for failure in failures if failure.fix not in needed):
        subjects = dict.fromkeys(failure.subject for failure in failures if failure.fix == fix)
        if fix.startswith("retouch data check") and not script:  # the recipe has keys without which the rows are read differently
            fix = shlex.join(["retouch", "data", "check", *arguments])
        yield f"{fix}  ({', '.join(subjects)})" if len(failures) > 1 else fix
    if needed and script:
        keys = ", ".join(option.removeprefix("--set ") for option in needed)
        yield f"give the Trainer of the script {keys} (a name with a dot is an argument of that part: PickScore(path=...))"
    elif needed:
        replaced = {fix.partition(" ")[0] for fix in needed}
        kept = [option for option in options if option.partition(" ")[0] not in replaced]
        yield " ".join([shlex.join(["retouch", "doctor", *arguments]), *kept, *needed])


def _check_recipe(report: _Report, group: RankGroup, recipe: Recipe, device_name: str, options: DoctorOptions) -> None:
    """Run the checks of a recipe; then, if nothing failed on any rank, the trial step on all ranks."""
    world = report.world or recipe.ranks or 1
    report.add(check_batch(recipe, world=world))
    report.add(check_sharding_settings(recipe, world=world))
    report.add([check_trackers(recipe), *check_push(recipe), check_folder(recipe)])
    read = []
    for finding, data in check_data(recipe):
        report.add([finding])
        read.append(data)
    sets, steps = next((data for data in read if data is not None), None), phase_steps(recipe, read)
    calls = calls_of(recipe, steps=steps, sets=sets)
    report.add(check_reward(recipe, sets, calls=calls))
    report.add(check_engines(recipe))
    report.add(check_prompt_embeddings(recipe))
    device, disk = None, False  # ``disk``: whether the first rank has checked the disk
    sized, missing = _with_known_size(recipe, options.base)
    if sized is None:
        report.add(missing)
    else:
        folder, absent = _weights(sized)
        joined = None if report.world is None else group.ranks.device
        target, finding = check_device(device_name, device=joined, weights_here=not (absent or missing))
        report.add([finding])
        report.add(check_kernels(sized, target))
        disk = not report.is_main
        if target is not None and report.is_main:
            checkpoint = _dry_run(report, sized, target, device_name, options, world=world, calls=calls)
            if checkpoint is not None:
                disk = True
                report.add([check_disk(sized, checkpoint, steps=steps)])
        if missing:
            report.add(missing)
        elif not absent:
            report.add([ok("weights", f"loaded by {sized.image_model.source}" if folder is None else str(folder))])
        else:
            text = f"the weights of {' and '.join(absent)} are not on this machine: they will be downloaded when training starts"
            report.add([note("weights", text)])
        if target is not None and not (absent or missing):
            device = target.device
    devices = group.gather_texts("" if device is None else str(device))
    if not group.gather_failures(report.found) and "" not in devices:
        assert device is not None
        ranks = Ranks(rank=group.ranks.rank, world=group.ranks.world, device=device)
        report.add(check_trial(recipe, ranks, steps=steps, check_space=not disk))


def _dry_run(
    report: _Report,
    recipe: Recipe,
    target: PlannedDevice,
    device_name: str,
    options: DoctorOptions,
    *,
    world: int,
    calls: Sequence[Calls],
) -> int | None:
    """Make a dry run for a GPU, for large weights, or on request, and report its memory and time. Returns the bytes of a
    checkpoint; None if they are not known."""
    if not options.dry_run:
        report.add([note("memory", "not checked, because of --no-rehearsal")])
        return None
    on_cpu = target.device is not None and target.device.type == "cpu"
    if on_cpu and not options.estimate:
        folders = {section.find_weights()[0] for section in (recipe.policy.model, recipe.image_model)}
        files = (file for folder in folders if folder is not None for file in folder.rglob("*.safetensors"))
        if sum(file.stat().st_size for file in files) < _LARGE:
            return None
    machine = machine_of(target, device_name)
    if on_cpu and options.estimate:
        machine = MACHINES[DEFAULT_GPU]
        report.add([note("time", f"estimated for {DEFAULT_GPU}, because no GPU was named; --device names one")])
    from retouch_plan.estimate import check_dry_run  # it is slow to import

    timed = not on_cpu or options.estimate
    findings, checkpoint = check_dry_run(recipe, machine, world=world, timed=timed, price=options.price, calls=calls)
    report.add(findings)
    return checkpoint


def _with_known_size(recipe: Recipe, base: str | None) -> tuple[Recipe | None, list[Finding]]:
    """The recipe for a dry run, and a failure if its weights are incomplete or do not exist yet, or a note if ``base`` stands for
    weights that can be downloaded. If they do not exist yet, the recipe has a model of the same size in their place, or is None if
    no such model is known; if they are incomplete, it is None."""
    path, absent = getattr(recipe.policy.model, "path", None), False
    try:
        image_folder, _ = _weights(recipe)
        folder, here = recipe.policy.model.find_weights()
        recipe.policy.train.require_files()
        if folder is not None and isinstance(path, str):
            require_complete(folder, path=path, key="policy.model.path")
        image_path = getattr(recipe.image_model, "path", None)
        if recipe.image_model is not recipe.policy.model and image_folder is not None and isinstance(image_path, str):
            require_complete(image_folder, path=image_path, key="renderer.model.path")
    except IncompleteWeights as error:
        return None, [failed("weights", str(error), fix=error.command)]
    except ValueError as error:
        if not isinstance(path, str) or path not in str(error) or path.endswith(SINGLE_FILES):
            named = str(error).partition(":")[0]  # the key
            fix = "--set policy.model.path=FOLDER" if not named.startswith("policy.") else f"correct {named}"
            return None, [failed("weights", str(error), fix=fix)]
    else:
        if here or base is None or not isinstance(path, str):
            return recipe, []
        absent = True
    base, text, fix = future_weights(path, base=base, absent=absent)
    finding = failed("weights", text, fix=fix) if fix else note("weights", text)
    return None if base is None else parse(recipe.document(), [f"policy.model.path={base}"]), [finding]


def _weights(recipe: Recipe) -> tuple[Path | None, list[str]]:
    """The folder of the image model's weights if it has one, and the models, also those that teach, whose weights are not on this
    machine. Raises ValueError for a wrong path."""
    found = [(each.source, *each.find_weights()) for each in (recipe.policy.model, recipe.image_model)]
    files = MODEL if recipe.policy.is_autoregressive else DENOISER
    taught = [path for path in teachers(recipe, "model").values() if find_weights(path, files, key="objective.teachers") is None]
    return found[-1][1], list(dict.fromkeys([*(source for source, _, here in found if not here), *taught]))
