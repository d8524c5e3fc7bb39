"""The table of docs/machines.md on what makes Qwen-Image-Edit's Flow-GRPO faster: its step, rehearsed with each change turned back.

    python benchmarks/rehearsal/speedup.py [NAMES ...]

Rehearses the recipe as it is, with one change turned back at a time, and with the changes added one after the other to the recipe
without any of them, and writes the table. NAMES are changes that are turned back together, such as ``lora,adamw``; if there are
some, only these are rehearsed. What was found is kept in speedup.json beside this file.
"""

import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).with_name("speedup.json")
PAGE = ROOT / "docs" / "machines.md"
MARK = "<!-- speedup -->"
RECIPE = ROOT / "recipes" / "qwen-image-edit" / "flow-grpo.jsonnet"
MACHINE = "h100"
HEADER = (
    "| change | turned back by | s per image without it: all, rollout, update | times faster | added: s per image | "
    "times faster | share |\n| --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Change:
    """``off``: the settings that turn it back. ``joint``: both branches of guidance in one forward, as no recipe can have them."""

    title: str
    off: tuple[str, ...] = ()
    joint: bool = False


CHANGES = {
    "guidance": Change("branches of guidance apart, without a mask", joint=True),
    "lora": Change("LoRA computes in bf16", off=('policy.train.weights="float32"',)),
    "shapes": Change("equal forward shapes in rollout and update", off=("rollout.equal_shapes=false",)),
    "adamw": Change("fused AdamW", off=('optimizer.fused="never"',)),
    "compile": Change("blocks compiled", off=("policy.compile=null",)),
}
"""In the order in which they are added."""


@contextmanager
def joint_guidance() -> Iterator[None]:
    """Both branches of guidance go through one forward, padded to the longer text."""
    import torch

    from retouch.models.common.wrappers import Guided
    from retouch.types import Conditioning

    def velocity(model: Any, module: Any, x: Any, sigma: Any, conditioning: Any) -> Any:
        own = Conditioning(conditioning.tensors, conditioning.padded, conditioning.shared)
        both = Conditioning.concat([own, conditioning.negative])
        positive, negative = model.model.velocity(module, torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return model.combine(positive, negative, model.guidance_scale)

    with patch.object(Guided, "velocity", velocity):
        yield


def rehearse_without(names: Sequence[str]) -> dict[str, float]:
    """Seconds per image of the recipe without these changes: of the step, the rollout and the update; and its peak in bytes."""
    from retouch.recipe.recipe import load, parse
    from retouch.rehearsal import report
    from retouch.rehearsal.machines import MACHINES
    from retouch.rehearsal.step import rehearse

    machine, turned_back = MACHINES[MACHINE], [CHANGES[name] for name in names]
    recipe = parse(load(RECIPE).document(), [setting for change in turned_back for setting in change.off])
    with ExitStack() as stack:
        if any(change.joint for change in turned_back):
            stack.enter_context(joint_guidance())
        found = rehearse(recipe, machine)
    phase = found.phases[0]
    each = {name: report.seconds(found.stages[name].work, machine) / phase.rows for name in phase.stages}
    kinds = {kind: spent / phase.rows for kind, spent in report.step_work(found, 0).seconds.items()}
    return {
        "step": sum(each.values()),
        "rollout": each["rollout"],
        "update": each["update"],
        "peak": report.peak(found),
        "ideal": report.ideal_seconds(report.step_work(found, 0), machine) / phase.rows,
        **{f"kind: {name}": spent for name, spent in sorted(kinds.items())},
    }


def table(kept: dict[str, dict[str, float]]) -> str:
    """A row for each change, after one for the recipe without any of them. ``kept``: by the names that were turned back, with
    commas."""
    now, before = kept[""], kept[",".join(CHANGES)]
    lines, last = [HEADER, f"| none of them | all of the below | | | {before['step']:.2f} | 1.00 | |"], before
    for index, (name, change) in enumerate(CHANGES.items()):
        alone, added = kept[name], kept[",".join(list(CHANGES)[index + 1 :])]
        share = math.log(last["step"] / added["step"]) / math.log(before["step"] / now["step"])
        how = " ".join(f"`--set '{each}'`" for each in change.off) or "the script"
        cells = [
            change.title,
            how,
            ", ".join(f"{alone[part]:.2f}" for part in ("step", "rollout", "update")),
            f"{alone['step'] / now['step']:.2f}",
            f"{added['step']:.2f}",
            f"{before['step'] / added['step']:.2f}",
            f"{round(100 * share) or 0} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        last = added
    return "\n".join(lines)


def combinations() -> list[str]:
    """The names that are turned back in each rehearsal of the table, with commas."""
    names = list(CHANGES)
    return list(dict.fromkeys([*names, *(",".join(names[index:]) for index in range(len(names) + 1))]))


def main(chosen: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for names in chosen or combinations():
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
        kept[names] = rehearse_without([name for name in names.split(",") if name])
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(names or "the recipe as it is", {name: round(value, 3) for name, value in kept[names].items()}, flush=True)
    before, _, after = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{before}{MARK}\n\n{table(json.loads(KEPT.read_text()))}\n\n{MARK}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
