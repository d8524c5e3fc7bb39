"""Trials of faster settings for the quickstart; docs/quickstart-trials.md describes them.

    python measurements/league/quickstart_trials.py             # the table of all trials
    python measurements/league/quickstart_trials.py --repeat 5  # the command that repeats one trial

The trials are in quickstart_trials.json: the settings that differ from recipes/playground/grpo.jsonnet, and the results on tasks of
the `validation` split. The table on the page is the output of this file (`tests/measurements/test_quickstart_trials.py`).
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

TRIALS = Path(__file__).with_suffix(".json")
COLUMNS = ("nr", "method and sampling", "tasks x samples", "learning rate", "other settings", "steps", "CPU s a step")
MEASURED = ("share of gap", "IP", "PQ", "singles")


def read() -> list[dict[str, Any]]:
    """The trials in the order in which they ran."""
    trials: list[dict[str, Any]] = json.loads(TRIALS.read_text(encoding="utf-8"))["trials"]
    return trials


def overrides(trial: dict[str, Any]) -> list[str]:
    """The arguments of ``--set`` with which ``retouch train recipes/playground/grpo.jsonnet`` repeats the trial."""
    return [f"{key}={json.dumps(value)}" for key, value in trial["settings"].items()]


def command(trial: dict[str, Any]) -> str:
    """The shell command that repeats the trial."""
    words = ["retouch", "train", "recipes/playground/grpo.jsonnet"]
    for override in overrides(trial):
        words += ["--set", override]
    return shlex.join(words)


def table() -> str:
    """All trials as a table in Markdown."""
    lines = [" | ".join(["", *COLUMNS, *MEASURED, ""]).strip(), "| --- " * len((*COLUMNS, *MEASURED)) + "|"]
    for number, trial in enumerate(read(), 1):
        settings = trial["settings"]
        cells = [str(number), trial["method"], f"{settings['tasks_per_step']} x {settings['group_size']}"]
        cells += [f"{settings['learning_rate']:g}", trial["other"], "", f"{trial['cpu_seconds'] / trial['steps']:.2f}"]
        for point in trial["points"]:
            cells[5] = str(point["step"])
            changes = (f"{point[name]:+.2f}" for name in ("IP", "PQ", "singles"))
            lines.append("| " + " | ".join([*cells, f"{point['share']:.2f}", *changes]) + " |")
            cells = [""] * len(COLUMNS)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, metavar="NR", help="print the command that repeats this trial")
    arguments = parser.parse_args()
    print(table() if arguments.repeat is None else command(read()[arguments.repeat - 1]))


if __name__ == "__main__":
    main()
