"""The sentences of docs/machines.md about the stored dry runs of all recipes."""

import json
from pathlib import Path
from typing import Any

from retouch_plan.machines import FREE_SHARE, MACHINES

ROOT = Path(__file__).parents[2]
KEPT: dict[str, dict[str, Any]] = json.loads((ROOT / "measurements" / "rehearsal" / "rehearsed.json").read_text(encoding="utf-8"))
PAGE = " ".join((ROOT / "docs" / "machines.md").read_text(encoding="utf-8").split())


def test_the_page_states_the_cpu_time_of_the_stored_dry_runs():
    seconds = [row["cpu_seconds"] for row in KEPT.values()]
    assert f"It takes {min(seconds):.0f} to {max(seconds):.0f} s of CPU time for the recipes below." in PAGE


def test_the_page_names_the_recipe_with_the_smallest_margin():
    allowed = {name: (1 - FREE_SHARE) * MACHINES[row["machine"]].memory for name, row in KEPT.items()}
    name = min(KEPT, key=lambda each: allowed[each] - KEPT[each]["peak"])
    peak, most = KEPT[name]["peak"] / 1e9, allowed[name] / 1e9
    assert f"also `{name}` with 1024-pixel images, which has the smallest margin ({peak:.1f} GB of the {most:.1f} GB" in PAGE
