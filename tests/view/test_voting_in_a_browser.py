"""Voting in a real browser: with keys, on a phone, with hostile text, and on the queue of a training run."""

import pytest
from conftest import WIDE_AND_PHONE, fits
from PIL import Image

from retouch.records.folder import RunFolder, SampleRecord
from retouch.types import Sample, Task
from retouch_view.votes.log import VoteLog
from retouch_view.votes.queue import VoteQueue

HOSTILE = "<b id=planted>bold</b><script>document.title='planted'</script>\u202egnp.terces " + "w" * 3000


@pytest.fixture
def options():
    return {"vote": True}


def write_run(root, *, tasks=3, instruction="make it red"):
    folder = RunFolder(root / "runs" / "one")
    folder.write_recipe({"name": "one", "steps": 4})
    for step in (0, 4):
        records = [
            SampleRecord(
                sample=Sample(
                    Task(f"t/{number}", instruction, images=(Image.new("RGB", (24, 24), "white"),)),
                    Image.new("RGB", (24, 24), (50 * step, number, 9)),
                ),
                group=number,
                slot=0,
                scores={"judge": float(step)},
                reward=0.0,
            )
            for number in range(tasks)
        ]
        folder.write_samples(step, "heldout", records)
    return folder


@WIDE_AND_PHONE
def test_pairs_are_voted_on_with_keys_and_buttons_up_to_the_results(tab, address, tmp_path):
    folder = write_run(tmp_path)
    tab.goto(f"{address}/#/vote/one")
    tab.get_by_label("Your name").fill("Ann")
    assert fits(tab)
    tab.get_by_role("button", name="Vote on these pairs").focus()
    tab.keyboard.press("Enter")
    tab.get_by_text("0 of 3 pairs").wait_for()
    assert fits(tab)
    assert tab.locator(".vote-choice.right").is_visible()
    tab.keyboard.press("ArrowLeft")
    tab.get_by_text("1 of 3 pairs").wait_for()
    tab.keyboard.press("ArrowUp")
    tab.get_by_text("2 of 3 pairs").wait_for()
    tab.keyboard.press("u")
    tab.get_by_text("taken back").wait_for()
    tab.get_by_text("1 of 3 pairs").wait_for()
    tab.keyboard.press("ArrowDown")
    tab.get_by_text("2 of 3 pairs").wait_for()
    tab.get_by_role("button", name="right image").click()
    tab.get_by_text("voted on every pair").wait_for()
    votes = VoteLog(folder.root).read()
    assert ([vote.choice for vote in votes.votes], votes.undone) == (["left", "both_bad", "right"], 1)
    assert {vote.voter for vote in votes.votes} == {"Ann"}
    tab.get_by_role("link", name="See the results").click()
    tab.get_by_role("heading", name="Win rates").wait_for()
    assert tab.get_by_text("1 row with fewer than 10 votes").count() == 2, "of the win rates, and of judges"
    assert tab.get_by_text("2 rows with fewer than 10 votes").count() == 1, "of the model"
    assert not tab.get_by_role("table").first.get_by_text("step 4").is_visible()
    tab.get_by_role("heading", name="Voters").wait_for()
    assert fits(tab)


def test_hostile_text_is_not_rendered_as_html(tab, address, tmp_path):
    write_run(tmp_path, instruction=HOSTILE)
    tab.goto(f"{address}/#/vote/one")
    tab.get_by_label("Your name").fill("<i id=planted>x</i>")
    tab.get_by_role("button", name="Vote on these pairs").click()
    tab.get_by_text("bold").first.wait_for()
    tab.keyboard.press("ArrowLeft")
    tab.get_by_text("1 of 3 pairs").wait_for()
    assert fits(tab)
    tab.goto(f"{address}/#/votes/one")
    tab.get_by_text("<i id=planted>").wait_for()
    assert tab.locator("#planted").count() == 0
    assert tab.title() != "planted"
    assert fits(tab)


def test_new_pairs_of_a_training_run_appear_without_a_reload(tab, address, tmp_path):
    folder = write_run(tmp_path)
    queue = VoteQueue(folder.root / "queue")

    def put(number):
        images = [Image.new("RGB", (24, 24), (90 * k, number, 0)) for k in range(2)]
        return queue.put(Task(f"q/{number}", "make it red", (images[0],)), images, pairs=None)

    group = put(0)
    tab.goto(f"{address}/#/vote/one")
    tab.get_by_label("Your name").fill("Ann")
    tab.get_by_role("button", name="Vote on this run's samples").click()
    tab.get_by_text("1 pairs wait").wait_for()
    tab.keyboard.press("ArrowRight")
    tab.get_by_text("No pair waits").wait_for()
    assert queue.unanswered(group) == []
    put(1)
    tab.get_by_role("button", name="left image").wait_for()
