"""Compares a run trained only by simulated votes to a run with as many exact rewards, and to DPO on the same votes.

    python measurements/judging/votes.py votes --seed 0
    python measurements/judging/votes.py exact --seed 0
    python measurements/judging/votes.py dpo --seed 0        # after `votes`, from its votes
    python measurements/judging/votes.py table

The task is that of `playground/grpo`: the playground's editor learns instructions with several edits. DPO makes no rollouts. A
simulated voter (`retouch votes simulate`, a separate process) prefers the left image with probability sigmoid(difference / 0.5),
where the difference is that of the exact scores, and votes for a tie if it is below 0.1. Each result is kept in `votes.json` next
to this file.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from retouch.config import consent
from retouch.recipe.recipe import Recipe, load, parse
from retouch.run.session import run
from retouch_view.votes.commands import export
from retouch_view.votes.log import VoteLog
from retouch_worlds.rewards import PlaygroundReward

sys.path.insert(0, str(Path(__file__).parent))  # DPO's reward is a class of this file
KEPT = Path(__file__).with_name("votes.json")
NOISE, TIE = 0.5, 0.1
VOTES = 2000


class PlaygroundScores(PlaygroundReward):
    """The playground's judge without its check of the data kind: the training data of DPO are a folder."""

    data_kinds = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("way", choices=("votes", "exact", "dpo", "table"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/votes"))
    parser.add_argument("--learning-rate", type=float, help="default: that of playground/grpo")
    parser.add_argument("--beta", type=float, default=10.0, help="beta of DPO")
    parser.add_argument("--steps", type=int, default=100, help="training steps of DPO, with 32 pairs each")
    given = parser.parse_args()
    if given.way == "table":
        print(table())
        return
    base = load("playground/grpo", [f"seed={given.seed}", "device=cpu", "eval.best_of_k=0", "samples.every=0"])
    name = f"dpo-{given.beta:g}-{given.seed}" if given.way == "dpo" else f"{given.way}-{given.seed}"
    rate = {} if given.learning_rate is None else {"learning_rate": given.learning_rate}
    document = {**base.document(), **rate, "name": name, "out": str(given.out), "trackers": []}
    make = {"votes": _with_votes, "exact": _with_scores, "dpo": _with_pairs}[given.way]
    with consent.allowing(["votes"]):
        recipe = make(document, given)
    voter = _start_voter(recipe) if given.way == "votes" else None
    try:
        with consent.allowing(["votes"]):
            run(recipe, fresh=True)
    finally:
        if voter is not None:
            voter.terminate()
            voter.wait()
    _keep(name, recipe)


def _with_votes(document: dict[str, Any], given: argparse.Namespace) -> Recipe:
    """The recipe with one vote on each pair of samples: 40 steps of 50 tasks with two samples each."""
    votes = {"kind": "votes", "queue": str(given.out / document["name"] / "queue")}
    reward = {
        "kind": "several",
        "rewards": {"votes": votes, "judge": {"kind": "playground"}},
        "combine": {"votes/preference": 1.0},
        "max_missing": 1.0,
    }
    sizes = {"steps": 40, "tasks_per_step": VOTES // 40, "group_size": 2}
    column = {**document["eval"], "column": "judge/overall"}
    return parse({**document, **sizes, "reward": reward, "eval": column})


def _with_scores(document: dict[str, Any], given: argparse.Namespace) -> Recipe:
    """The recipe with as many exact rewards as there are votes: 40 steps of 10 tasks with five samples each."""
    return parse({**document, "steps": 40, "tasks_per_step": VOTES // 200, "group_size": 5})


def _with_pairs(document: dict[str, Any], given: argparse.Namespace) -> Recipe:
    """The recipe of DPO, without rollouts, on the pairs of the run `votes` with this seed. About 1100 of 2000 votes are no ties."""
    folder = given.out / f"pairs-{given.seed}"
    if not folder.exists():
        print(export([VoteLog(given.out / f"votes-{given.seed}" / "queue")], folder))
    data = {"kind": "folder", "path": str(folder), "held_out": 0}
    objective = {"kind": "dpo", "pairs": "data", "shift": 3.0, "beta": given.beta}
    phase = {"name": "pairs", "steps": given.steps, "data": data, "objective": objective, "group_size": 2, "tasks_per_step": 32}
    reward = {"kind": "import", "class": "votes:PlaygroundScores", "combine": {"overall": 1.0}}
    # The phase without steps provides the held-out tasks.
    return parse({**document, "steps": None, "reward": reward, "phases": [{"name": "edits", "steps": 0}, phase]})


def _start_voter(recipe: Recipe) -> "subprocess.Popen[bytes]":
    words = ["votes", str(recipe.folder / "queue"), "simulate", "playground", "--column", "overall"]
    noise = ["--noise", str(NOISE), "--tie", str(TIE), "--seed", str(recipe.seed), "--limit", str(VOTES)]
    return subprocess.Popen([sys.executable, "-m", "retouch", *words, *noise])


def _keep(name: str, recipe: Recipe) -> None:
    summary = json.loads((recipe.folder / "summary.json").read_text())
    evals = [json.loads(line) for line in (recipe.folder / "evals.jsonl").read_text().splitlines()]
    log = VoteLog(recipe.folder / "queue").read()
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    kept[name] = {
        "summary": {key: summary[key] for key in ("before", "after", "ceiling", "gap_closed", "seconds") if key in summary},
        "votes": len(log.votes),
        "ties": sum(not vote.is_decided for vote in log.votes),
        "steps": summary["steps"],
        "learning_rate": recipe.learning_rate,
        "evals": [
            {"step": line["step"], "split": line["split"], "table": line["table"]} for line in evals if line["split"] == "heldout"
        ],
    }
    KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    print(name, kept[name]["summary"])


def table() -> str:
    """The kept results as a table in Markdown."""
    lines = ["| training | seed | votes | before | after | share of gap |", "| --- | --- | --- | --- | --- | --- |"]
    for name, result in json.loads(KEPT.read_text()).items():
        way, _, seed = name.rpartition("-")
        found = result["summary"]
        share = "" if found.get("gap_closed") is None else f"{found['gap_closed']:.2f}"
        lines.append(f"| {way} | {seed} | {result['votes'] or ''} | {found['before']:.2f} | {found['after']:.2f} | {share} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
