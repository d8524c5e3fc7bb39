"""Kills a run whose judge draws random scores without a seed, resumes it, and reports the outcome.

`python tests/support/kill_random_judge.py OUT COUNT` prints a JSON line per place: whether the resumed run has the same bits as a
run that was never killed and got the same scores, and how many samples the judge scored again although the ledger had their scores.
"""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from kill_places import bits, import_models, in_child, kill_at, recipe
from random_judge import said
from retouch.recipe.recipe import Recipe, parse

PLACES = (
    ("retouch.rewards.judging:RewardScorer._ask", 3, "before"),
    ("retouch.rewards.ledger.journal:Journal.record", 3, "after"),
    ("retouch.rewards.judging:RewardScorer._collect", 5, "after"),
    ("retouch.rewards.ledger.journal:Journal.record", 5, "before"),
    ("retouch.training.checkpoint:save", 1, "after"),
    ("retouch.distributed.stepper:ReplicatedStepper.step", 3, "before"),
    ("retouch.records.files:append_line", 5, "after"),
    ("retouch.session.evaluations:RunEvaluations.write_summary", 1, "before"),
)


def by_luck(out: Path, name: str, log: Path, *, replay: bool = False) -> Recipe:
    document = recipe(out, name, None).document()
    arguments = {"log": str(log), "replay": replay}
    document["learning_rate"] = 0.01  # so that every step changes the images: an unchanged image may be judged twice
    document["reward"] = {"kind": "import", "class": "random_judge:RandomJudge", "args": arguments, "combine": {"luck": 1}}
    return parse(document)


def train(made: Recipe) -> None:
    from retouch.session.session import run

    assert run(made, fresh=False) == 0


def in_ledger(folder: Path) -> set[str]:
    """Return the samples in the ledger of the killed run, with the names that the judge gives them."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        return {f"{task} {picture}" for task, picture in ledger.execute("SELECT task, picture FROM samples")}


def main(out: Path, count: int) -> None:
    import_models()

    for number, (place, call, when) in enumerate(PLACES[:: max(1, len(PLACES) // count)][:count]):
        log = out / f"said-{number}.jsonl"
        made = by_luck(out, f"killed-{number}", log)

        def killed(place: str = place, call: int = call, when: str = when, made: Recipe = made) -> None:
            kill_at(place, call, when)
            train(made)

        ended = in_child(killed)
        before, held = len(said(log)), in_ledger(made.folder)
        resumed = in_child(lambda made=made: train(made))
        again = [name for name, _ in said(log)[before:] if name in held]
        told = by_luck(out, f"told-{number}", log, replay=True)
        whole = in_child(lambda told=told: train(told))
        found, expected = (bits(each.folder) if code == 0 else {} for each, code in ((made, resumed), (told, whole)))
        differing = sorted(key for key in expected.keys() | found.keys() if found.get(key) != expected.get(key))
        result = {
            "place": f"{when} call {call} of {place}",
            "ended": ended,
            "resumed": [resumed, whole],
            "held": len(held),
            "asked_again": len(again),
            "differing": differing,
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
