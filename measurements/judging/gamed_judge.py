"""Do the alarms of ``watch`` end a run whose judge is gamed, and do they leave a run with an honest judge alone?

    python measurements/judging/gamed_judge.py [--steps 40] [--seeds 0] [--gentle]

Makes three runs of the policy of `playground/grpo` on the playground, with an observation every 5 steps. The held-out judge is the
``exact`` column of the exact judge. The run `honest` is trained on the ``overall`` score of the exact judge; `gamed` on the mean of
this score and the image's luminance; `drifting` on this score, which is one point lower after 400 images. A run ends after its
last step or by an alarm; with --gentle, only the alarm of the held-out judge ends a run. Prints a table, and writes all
observations as JSON.
"""

import argparse
import json
import shutil
from pathlib import Path

from flawed_judges import Drifting

from retouch.recipe.recipe import load
from retouch.records.folder import RunFolder
from retouch.run.hooks import AlarmStop
from retouch.run.session import run
from retouch.run.watch import read_observations

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "runs" / "gamed"
WATCH = {
    "every": 5,
    "tasks": 48,
    "judge": {"reward": {"kind": "playground", "combine": {"exact": 1}}, "on_alarm": "stop"},
    "canaries": {"count": 8, "on_alarm": "stop"},
    "diversity": {"on_alarm": "stop"},
    "brightness": {"on_alarm": "stop"},
    "saturation": {"on_alarm": "stop"},
    "detail": {"on_alarm": "stop"},
}


def watched(name: str, seed: int, steps: int, *, gentle: bool) -> dict[str, object]:
    """Make one run and return how it ended. ``gentle``: only the alarm of the held-out judge may end the run."""
    rewards = {
        "honest": {"kind": "playground", "combine": {"overall": 1}},
        "gamed": {"kind": "import", "class": "flawed_judges:Glow", "combine": {"liking": 1}},
        "drifting": {"kind": "import", "class": "flawed_judges:Drifting", "combine": {"overall": 1}},
    }
    watch = {key: value if key in ("every", "tasks", "judge") or not gentle else None for key, value in WATCH.items()}
    shutil.rmtree(OUT / f"{name}-{seed}", ignore_errors=True)
    sets = {"name": f"{name}-{seed}", "out": str(OUT), "seed": seed, "steps": steps, "reward": rewards[name], "watch": watch}
    sets |= {"tasks_per_step": 4, "group_size": 8, "microbatch": 32}
    sets |= {"eval.tasks": 48, "eval.best_of_k": 0, "eval.column": None, "eval.headline": None, "trackers": [], "samples.every": 0}
    Drifting.seen = 0
    recipe = load("recipes/playground/grpo.jsonnet", [f"{key}={json.dumps(value)}" for key, value in sets.items()])
    try:
        run(recipe, fresh=False)
    except AlarmStop as alarm:
        print(f"{name}: {alarm}\n")
    folder = RunFolder(recipe.folder)
    looks = [{"step": each.step} | {key: each.mean(key) for key in each.scores} for each in read_observations(folder.watch, steps)]
    ended = folder.read_alarm()
    rules = [] if ended is None else [alarm["rule"] for alarm in ended["alarms"]]
    times = folder.read_timings()
    share = sum(line.get("time/watch", 0.0) for line in times) / sum(line["time/step"] for line in times)
    step = None if ended is None else ended["step"]
    return {"run": name, "seed": seed, "ended_at": step, "rules": rules, "watch_share": share, "looks": looks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--runs", nargs="*", default=["gamed", "drifting", "honest"])
    parser.add_argument("--gentle", action="store_true", help="only the held-out judge may end a run")
    arguments = parser.parse_args()
    results = [watched(name, seed, arguments.steps, gentle=arguments.gentle) for seed in arguments.seeds for name in arguments.runs]
    print("| run | seed | ended | by | reward, first and last look | held out | brightness | share of time |")
    print("| --- " * 8 + "|")
    for one in results:
        first, last = one["looks"][0], one["looks"][-1]
        ended = "at its end" if one["ended_at"] is None else f"step {one['ended_at']}"
        cells = [one["run"], str(one["seed"]), ended, ", ".join(one["rules"]) or "-"]
        cells += [f"{first[key]:.2f} -> {last[key]:.2f}" for key in ("proxy", "heldout", "brightness")]
        print(f"| {' | '.join(cells)} | {one['watch_share']:.1%} |")
    path = Path(OUT) / "looks.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
