"""Options of `retouch view` in a browser: control requests to runs; and the parts of a sample that only some runs have."""

import json

import pytest
from conftest import WIDE_AND_PHONE, fits
from PIL import Image

from retouch.records.control import answer_request, read_requests
from retouch.records.folder import SampleRecord
from retouch.rewards.ledger.database import Database, image_hash
from retouch.rewards.ledger.journal import Journal, JournalRow
from retouch.types import Sample, Task
from retouch_judge.cache import AnswerCache, JudgeCall

HOSTILE = "<b id=planted>bold</b><script>document.title='planted'</script>\u202egnp.terces " + "w" * 3000


@pytest.fixture
def options():
    return {"control": True, "trying": "cpu"}


@pytest.fixture
def judged(write_run):
    """A run with a group of three training samples, and the answers of judges in its ledger."""
    folder = write_run("one")
    task = Task("task/7", "make it blue", images=(Image.new("RGB", (64, 64), "white"),))
    images = [Image.new("RGB", (64, 64), (0, 0, 80 * slot)) for slot in range(3)]
    records = [
        SampleRecord(sample=Sample(task, image), group=5, slot=slot, scores={}, reward=slot / 2, advantage=slot - 1.0)
        for slot, image in enumerate(images)
    ]
    folder.write_samples(4, "group", records)
    database = Database(folder.root / "ledger.sqlite")
    rows = [JournalRow("train", 3, 5, slot, "task/7", image_hash(image), None) for slot, image in enumerate(images)]
    Journal(database).record(rows, {})
    best, worst = rows[2].image, rows[0].image
    words = f"It is very blue. {HOSTILE}"
    calls = [
        JudgeCall(
            content="a", image=best, judge="judge one", rubric="r", scores={"share": 0.75}, text=words, seconds=1.5, cost=0.002
        ),
        JudgeCall(content="b", image=best, judge=HOSTILE, rubric="r", scores=None, fault="no number", text="w" * 1_000_000),
        JudgeCall(content="c", image=worst, judge="judge one", rubric="r", scores={"share": 0.0}, text="another sample"),
        JudgeCall(content="d", image=best, judge="0123", scores=None, fault="missing share", text="{}"),
    ]
    AnswerCache(database).record(calls)
    database.close()
    return folder


@WIDE_AND_PHONE
def test_control_requests_and_their_answers_are_shown(running, tab, address):
    tab.goto(f"{address}/#/run/one")
    tab.get_by_role("button", name="Save a checkpoint").click()
    tab.get_by_text("The run takes the request at the end of its current step.").wait_for()
    ((name, request),) = read_requests(running).items()
    assert request.action == "checkpoint"
    tab.get_by_text("waiting for the end of the step").wait_for()
    answer_request(running, name, request, taken=True, step=3, answer="saved a checkpoint of step 3")
    tab.get_by_role("cell", name="saved a checkpoint of step 3").wait_for()
    assert tab.get_by_text("The run takes the request").count() == 0, "the list has the answer"
    tab.get_by_label("steps between samples").fill("7")
    tab.get_by_role("button", name="Change").click()
    tab.get_by_role("row", name="samples every 7").wait_for()
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.get_by_role("button", name="Stop after this step").click()
    tab.get_by_role("row", name="stop").wait_for()
    assert [each.action for each in read_requests(running).values()] == ["checkpoint", "samples", "stop"]
    assert fits(tab)


def test_hostile_text_in_a_control_request_is_not_rendered_as_html(running, tab, address):
    running.control.mkdir()
    request = {"action": "stop", "value": None, "by": HOSTILE, "at": HOSTILE[:50], "taken": False, "step": 1, "answer": HOSTILE}
    (running.control / "0.json").write_text(json.dumps(request))
    tab.goto(f"{address}/#/run/one")
    tab.get_by_text("bold").first.wait_for()
    assert tab.locator("#planted").count() == 0
    assert tab.title() != "planted"
    assert fits(tab)


def test_a_finished_run_has_no_buttons(write_run, tab, address):
    write_run("one")
    tab.goto(f"{address}/#/run/one")
    tab.get_by_role("heading", name="one").wait_for()
    assert not tab.get_by_role("button", name="Stop after this step").is_visible()
    tab.get_by_role("link", name="Try it").click()
    tab.get_by_text("The run has no checkpoint yet.").wait_for()


@WIDE_AND_PHONE
def test_sample_shows_its_group_best_first_and_the_answers_of_its_judges(judged, tab, address):
    tab.goto(f"{address}/#/samples/one")
    tab.get_by_label("Set").select_option("group")
    tab.get_by_label("Sort by").select_option("reward:desc")
    tab.locator(".sample", has_text="reward 1").click()
    tab.get_by_role("heading", name="Its group, best first").wait_for()
    captions = tab.locator(".ranked figcaption").all_inner_texts()
    assert [caption.split()[-1] for caption in captions] == ["+1", "0", "-1"]
    tab.get_by_text("Answer 3 by a reward server").wait_for()
    tab.get_by_text("Answer 1 by judge one").click()
    tab.get_by_text("It is very blue.").wait_for()
    tab.get_by_text("Answer 2").click()
    tab.get_by_text("The first 20000 of 1000000 characters.").wait_for()
    assert tab.get_by_text("another sample").count() == 0
    assert tab.locator("#planted").count() == 0
    assert fits(tab)


def test_damaged_ledger_returns_409_with_an_error(judged, tab, address, tmp_path):
    (judged.root / "ledger.sqlite").write_bytes(b"not a ledger" * 1000)
    reply = tab.request.get(f"{address}/api/runs/one/answers?set=group&step=4&group=5&slot=2")
    assert reply.status == 409
    assert "cannot be used" in reply.json()["error"]
    assert tab.request.get(f"{address}/api/runs/one/answers?set=other&step=x").json() == {"answers": []}


def test_sample_shows_token_log_probabilities_and_denoising_states(write_run, tab, address):
    folder = write_run("one")
    image = Image.new("RGB", (64, 64), "blue")
    tokens = [("paint", -0.01), (" it", -0.5), (f" {HOSTILE}", -1.0), (" blue", -2.0), ("!", -7.0)]
    sample = Sample(Task("task/7", "make it blue"), image)
    record = SampleRecord(
        sample=sample, group=0, slot=0, scores={}, reward=1.0, text="paint it", tokens=tokens, states=[image, image]
    )
    folder.write_samples(4, "group", [record])
    tab.goto(f"{address}/#/samples/one")
    tab.get_by_label("Set").select_option("group")
    tab.locator(".sample", has_text="make it blue").click()
    tab.get_by_role("heading", name="Denoising steps around its actions").wait_for()
    assert tab.get_by_alt_text("state 1").evaluate("image => image.decode().then(() => image.naturalWidth)") == 64
    spans = tab.locator(".tokens span")
    assert [spans.nth(place).get_attribute("class") for place in range(5)] == [f"level-{level}" for level in range(5)]
    assert spans.nth(4).get_attribute("title") == "log-probability -7"
    assert tab.locator("#planted").count() == 0
    assert fits(tab)


def test_malformed_tokens_and_states_are_not_shown(write_run, tab, address):
    folder = write_run("one")
    path = folder.samples(4) / "samples.jsonl"
    line = json.loads(path.read_text()) | {
        "text": "a completion",
        "tokens": [3, [4, 5], None, {"a": 1}],
        "states": [1, "../../x.png"],
    }
    path.write_text(json.dumps(line) + "\n")
    found = tab.request.get(f"{address}/thumbnails/one/4/..%2f..%2fx.png")
    assert found.status == 404
    path.write_text(json.dumps(line | {"states": "x"}) + "\n")
    tab.goto(f"{address}/#/samples/one")
    tab.locator(".sample").first.click()
    tab.get_by_text("a completion").wait_for()
    assert tab.locator(".tokens").count() == 0
