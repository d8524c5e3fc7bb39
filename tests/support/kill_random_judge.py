"""Kills a run whose judge draws random scores without a seed, resumes it, and reports the outcome.

`python tests/support/kill_random_judge.py OUT COUNT` prints a JSON line per place: whether the resumed run is bitwise equal to an
uninterrupted run with the same scores, and how many samples were judged again although the ledger contained their scores.
"""

import sqlite3
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

from kill_places import file_hashes, import_models, print_result, recipe, run_in_fork, some_of, train, train_until_killed
from random_judge import logged_scores
from retouch.recipe.recipe import Recipe, parse

PLACES = (
    ("retouch.rewards.judging:RewardScorer._start", 3, "before"),
    ("retouch.rewards.ledger.journal:Journal.record", 3, "after"),
    ("retouch.rewards.judging:RewardScorer._finish", 5, "after"),
    ("retouch.rewards.ledger.journal:Journal.record", 5, "before"),
    ("retouch.run.checkpoint:save", 1, "after"),
    ("retouch.distributed.optimizer:ReplicatedStepper.step", 3, "before"),
    ("retouch.records.files:append_line", 5, "after"),
    ("retouch.run.evaluation:RunEvaluations.write_summary", 1, "before"),
)


def random_judge_recipe(out: Path, name: str, log: Path, *, replay: bool = False) -> Recipe:
    document = recipe(out, name, None).document()
    arguments = {"log": str(log), "replay": replay}
    document["learning_rate"] = 0.01  # so that every step changes the images; judging an unchanged image twice is allowed
    document["reward"] = {"kind": "import", "class": "random_judge:RandomJudge", "args": arguments, "combine": {"luck": 1}}
    return parse(document)


def samples_in_ledger(folder: Path) -> set[str]:
    """Return the samples in the ledger of the killed run, with the names that the judge gives them."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        return {f"{task} {picture}" for task, picture in ledger.execute("SELECT task, picture FROM samples")}


def main(out: Path, count: int) -> None:
    import_models()

    for number, place in some_of(PLACES, count):
        log = out / f"logged_scores-{number}.jsonl"
        made = random_judge_recipe(out, f"killed-{number}", log)
        ended = run_in_fork(partial(train_until_killed, made, *place))
        before, held = len(logged_scores(log)), samples_in_ledger(made.folder)
        resumed = run_in_fork(partial(train, made))
        again = [name for name, _ in logged_scores(log)[before:] if name in held]
        told = random_judge_recipe(out, f"told-{number}", log, replay=True)
        whole = run_in_fork(partial(train, told))
        found, expected = (file_hashes(each.folder) if code == 0 else {} for each, code in ((made, resumed), (told, whole)))
        differing = sorted(key for key in expected.keys() | found.keys() if found.get(key) != expected.get(key))
        counts = {"held": len(held), "asked_again": len(again)}
        print_result(place, ended=ended, resumed=[resumed, whole], differing=differing, **counts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
