"""The recipes for one GPU: on each card for which they have settings, a step fits, and the run ends within a day."""

import pytest

from retouch.config.packaged import available, find, short_name
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import load
from retouch_plan.dry_run import dry_run, fits, hours, in_own_process
from retouch_plan.machines import MACHINES

CARDS = [
    (name, card) for name in map(short_name, available()) if name.endswith("/one-gpu") for card in evaluate(find(name))["cards"]
]


def test_seven_recipes_for_one_gpu_have_settings_for_their_cards():
    assert len({name for name, _ in CARDS}) == 7
    assert {"16gb", "24gb", "48gb", "80gb"} <= {card for _, card in CARDS}
    for name, card in CARDS:
        recipe = load(name, [f"card={card}"])
        assert recipe.steps == {("flux/one-gpu", "12gb"): 188, ("flux2-klein/one-gpu", "12gb"): 193}.get((name, card), 200)
        assert recipe.group_size >= 8


@pytest.mark.slow
@pytest.mark.parametrize(("name", "card"), CARDS)
def test_a_step_fits_into_the_card_and_the_run_ends_within_a_day(name, card):
    machine = MACHINES[card]
    found = in_own_process(dry_run, load(name, [f"card={card}"]), machine)
    assert fits(found, machine)
    assert hours(found, machine) <= 24
