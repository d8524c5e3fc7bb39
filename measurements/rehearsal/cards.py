"""Chooses what depends on the card in the recipes for one GPU, and writes the table of docs/machines.md about them.

    python measurements/rehearsal/cards.py [RECIPE ...] [--cards 16gb 24gb]

For each recipe and card, dry runs choose the keys with which a step fits, and as many tasks as the run can have to end within a
day. They are kept in recipes/lib/one_gpu.json, from which the recipes read them.
"""

import argparse
import json
import logging
import warnings
from typing import Any

from table import PAGE, ROOT, in_own_process, insert

CHOSEN = ROOT / "recipes" / "lib" / "one_gpu.json"
MARK = "<!-- cards -->"
CARDS = ("12gb", "16gb", "24gb", "48gb", "80gb")
MODELS = ("sd3", "flux2-klein", "z-image", "flux", "qwen-image", "photos", "qwen-image-edit")
RECIPES = [f"{model}/one-gpu" for model in MODELS]
ROWS = ("microbatch", "rollout.chunk", "eval.batch")
SIZES = (*ROWS, "tasks_per_step", "group_size", "steps")
HEADER = (
    "| recipe | card | images per step | peak GB | CPU memory GB | hours | s per image | rows at once: update, rollout | keys |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def choose(name: str, card: str, larger: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe on a card, and what a dry run with them shows. ``larger``: the keys of the next larger card, from which
    the choice starts. Raises ValueError if the model does not fit."""
    from retouch.recipe.document import evaluate
    from retouch.recipe.recipe import parse
    from retouch_plan.dry_run import hours, largest, seconds, step_work
    from retouch_plan.fitting import fit, most_rows, within_a_day
    from retouch_plan.machines import MACHINES

    machine, keys = MACHINES[card], larger
    document = evaluate(ROOT / f"recipes/{name}.jsonnet")
    document = {key: value for key, value in document.items() if key not in ("card", "cards")}

    def changed(keys: dict[str, Any]) -> Any:
        return parse(document, [f"{key}={json.dumps(value)}" for key, value in keys.items()])

    while True:
        keys = most_rows(changed(keys)) | keys
        fitting, found = fit(changed(keys), machine)
        keys |= fitting
        fewer = within_a_day(changed(keys), found, machine)
        if not fewer:
            break
        keys = {key: value for key, value in keys.items() if key not in ROWS} | fewer
    return {
        "keys": keys,
        "images": changed(keys).tasks_per_step * changed(keys).group_size,
        "peak": largest(found)[2],
        "host": found.host_peak,
        "hours": hours(found, machine),
        "seconds": seconds(step_work(found, 0), machine) / found.phases[0].rows,
    }


def row(name: str, card: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    if "keys" not in found:
        return f"| `{name}` | {card} | does not fit | | | | | | |"
    keys = found["keys"]
    others = [f"`{key}={json.dumps(value)}`" for key, value in keys.items() if key not in SIZES]
    cells = [f"`{name}`", card, str(found["images"]), f"{found['peak'] / 1e9:.1f}", f"{found['host'] / 1e9:.1f}"]
    cells += [f"{found['hours']:.1f}", f"{found['seconds']:.1f}", f"{keys['microbatch']}, {keys['rollout.chunk']}"]
    cells.append(" ".join(others))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--cards", nargs="+", default=CARDS, choices=CARDS)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in given.recipes or RECIPES:
        for card in sorted(given.cards, key=CARDS.index, reverse=True):
            chosen = json.loads(CHOSEN.read_text(encoding="utf-8"))
            of_recipe = chosen.get(name, {})
            larger = next((of_recipe[each] for each in CARDS[CARDS.index(card) + 1 :] if each in of_recipe), {})
            try:
                found = in_own_process(choose, name, card, larger.get("keys", {}))
            except ValueError as error:  # it does not fit with any keys
                found = {"why": str(error)}
            of_recipe |= {card: found}
            chosen[name] = {each: of_recipe[each] for each in CARDS if each in of_recipe}
            chosen = {each: chosen[each] for each in RECIPES if each in chosen}
            CHOSEN.write_text(json.dumps(chosen, indent=1) + "\n", encoding="utf-8")
            print(row(name, card, found), flush=True)
    rows = [row(name, card, found) for name, cards in chosen.items() for card, found in cards.items()]
    insert(PAGE, MARK, "\n".join([HEADER, *rows]))


if __name__ == "__main__":
    main()
