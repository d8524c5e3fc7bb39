"""The journal of scores: stored scores are returned bitwise, no sample is scored twice, and a kill loses nothing."""

import random
import sqlite3
import struct
from contextlib import closing

import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retouch.rewards.judging import CompositeReward, RewardScorer
from retouch.rewards.ledger.database import Database, ImageStore, decode_scores, image_hash
from retouch.rewards.ledger.journal import Journal, journal_rows
from retouch.run.ledger import ledger_path
from retouch.types import Batch, Column, Sample, Task

NAN = float("nan")
COLUMNS = {"quality": Column(-1.0, 1.0), "notes": Column(0.0, 1.0, diagnostic=True)}


class Counting:
    """Returns other scores at every call, so that a new score cannot be mistaken for a stored one; records the samples."""

    def __init__(self, *, broken=False):
        self.columns = COLUMNS
        self.asked: list[Sample] = []
        self.broken = broken

    def __call__(self, samples):
        self.asked += samples
        quality = torch.linspace(-1, 1, len(samples)) / len(self.asked)
        notes = torch.rand(len(samples))
        notes[::2] = NAN
        return {"quality": torch.full_like(quality, NAN) if self.broken else quality, "notes": notes}


def batch(step=3, *, groups=2, slots=3, first=0):
    tasks = tuple(Task(id=f"task/{k}", instruction="make it red") for k in range(first, first + groups))
    group = tuple(k for k in range(groups) for _ in range(slots))
    return Batch(1, step, tasks, tuple(range(first, first + groups)), group, tuple(range(slots)) * groups)


def pictures(batch, *, seed=0):
    drawn = []
    for row, group in enumerate(batch.group):
        colour = (seed, batch.group_ids[group], batch.slot[row])
        drawn.append(Sample(batch.tasks[group], PIL.Image.new("RGB", (5, 4), colour)))
    return drawn


def rows_of(batch):
    return journal_rows(batch, pictures(batch), split="train", step=batch.step)


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.int32), other.view(torch.int32))


def equal(one, other):
    columns = one.scores.keys() == other.scores.keys() and all(same(one.scores[name], other.scores[name]) for name in one.scores)
    return columns and same(one.rewards, other.rewards) and one.faults == other.faults


@pytest.fixture
def start(tmp_path):
    """Starts a run's scorer with the same ledger file again and again; the returned function scores a batch."""
    started: list[RewardScorer] = []

    def end():
        for judge in started:
            judge.close()
            assert judge.journal is not None
            judge.journal.database.close()

    def begin(reward, fingerprint="one", *, combine=None):
        end()
        started[:] = [RewardScorer(reward, combine or {"quality": 2.0})]
        started[0].journal = Journal(Database(tmp_path / "ledger.sqlite"), judge=fingerprint)

        def score(rows, samples=None, page=("train",)):
            return started[0].for_split(*page)(rows, pictures(rows) if samples is None else samples).result()

        score.judge = started[0]
        return score

    yield begin
    end()


def test_missing_scores_are_replayed_until_forget_missing_is_called(start, tmp_path):
    rows, mended = batch(), Counting()
    first = start(Counting(broken=True))(rows)
    assert first.rewards.isnan().all()
    score = start(mended)
    assert equal(score(rows), first)
    score.judge.forget_missing("train", rows.step + 1)
    score(rows)
    assert not mended.asked
    score.judge.forget_missing("train", rows.step)
    found = score(rows)
    assert not found.rewards.isnan().any()
    assert len(mended.asked) == 6
    assert found.scores["notes"].isnan().any()
    score.judge.forget_missing("train", rows.step)  # a missing diagnostic is no missing score
    assert equal(score(rows), found)
    assert len(mended.asked) == 6
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as reader:
        assert reader.execute("SELECT count(*) FROM scores").fetchone()[0] == 12


def test_only_changed_images_are_scored_and_they_replace_the_stored_rows(start):
    class Failing(Counting):
        def __call__(self, samples):
            raise ValueError("no answer")

    rows, reward = batch(), Counting()
    with pytest.raises(ValueError, match="no answer"):  # and nothing is stored
        start(Failing())(rows)
    score, old = start(reward), pictures(rows)
    first = score(rows, old)
    assert len(reward.asked) == 6
    mixed = [new if row in (1, 4) else before for row, (before, new) in enumerate(zip(old, pictures(rows, seed=9), strict=True))]
    second = score(rows, mixed)
    assert [sample.image for sample in reward.asked[6:]] == [mixed[1].image, mixed[4].image]
    assert [bool(x) for x in first.rewards == second.rewards] == [True, False, True, True, False, True]
    assert equal(score(rows, mixed), second)
    score(rows, old)
    assert [sample.image for sample in reward.asked[8:]] == [old[1].image, old[4].image]
    third = start(reward, "another judge")(rows)
    assert len(reward.asked) == 16
    assert equal(start(reward, "another judge")(rows), third)
    assert len(reward.asked) == 16


class Comparing(Counting):
    compares_groups = True


@pytest.mark.parametrize("inside", [False, True])
def test_whole_groups_are_scored_again_if_the_reward_compares_the_samples_of_a_task(start, inside):
    rows, reward = batch(), Comparing()
    several = CompositeReward({"own": reward})
    score = start(several, combine={"own/quality": 1.0}) if inside else start(reward)
    first = score(rows)
    with score.judge.journal.database.writing() as connection:
        connection.execute("DELETE FROM samples WHERE group_id = 1 AND slot = 2")
    second = score(rows)
    asked, whole = ([(sample.task.id, sample.image) for sample in each] for each in (reward.asked[6:], pictures(rows)[3:]))
    assert asked == whole
    assert same(second.rewards[:3], first.rewards[:3])
    assert equal(score(rows), second)


def test_the_same_image_in_another_step_group_slot_or_task_is_scored_again(start):
    rows, reward = batch(groups=1, slots=1), Counting()
    (sample,) = pictures(rows)
    score = start(reward)
    score(rows, [sample])
    for step, group, slot in ((4, 0, 0), (3, 7, 0), (3, 0, 1)):
        score(Batch(1, step, rows.tasks, (group,), (0,), (slot,)), [sample])
    score(rows, [Sample(Task(id="task/other", instruction="make it red"), sample.image)])
    assert len(reward.asked) == 5


def test_splits_and_evaluation_steps_have_separate_rows(start):
    """Held-out batches have the same groups and slots at each evaluation, and so do the target images of the ceiling."""
    rows, reward = batch(-1), Counting()
    pages = [("train", -1), ("heldout", 0), ("heldout", 25), ("ceiling", 0)]
    score = start(reward)
    first = [score(rows, pictures(rows, seed=seed), page) for seed, page in enumerate(pages)]
    assert len(reward.asked) == 24
    score = start(reward)
    again = [score(rows, pictures(rows, seed=seed), page) for seed, page in enumerate(pages)]
    assert all(equal(one, other) for one, other in zip(first, again, strict=True))
    assert len(reward.asked) == 24


def test_the_first_score_is_replayed_if_a_batch_contains_a_row_twice(start):
    """The last rank of an evaluation repeats the last task; its first score is used."""
    task, page = Task(id="last", instruction=""), ("heldout", 0)
    rows, samples = Batch(0, -1, (task,), (4,), (0, 0), (0, 0)), [Sample(task, PIL.Image.new("RGB", (2, 2)))] * 2
    reward = Counting()
    first = start(reward)(rows, samples, page)
    assert first.rewards[0] != first.rewards[1]
    again = start(reward)(rows, samples, page)
    assert again.rewards.tolist() == [first.rewards[0].item()] * 2
    assert len(reward.asked) == 2


def test_images_are_stored_by_hash_and_damaged_files_read_as_none(tmp_path):
    rows, kept = batch(), ImageStore(tmp_path)
    samples = pictures(rows)
    samples[1] = Sample(samples[1].task, None)
    with closing(Database(tmp_path / "ledger.sqlite")) as database, closing(RewardScorer(Counting(), {"quality": 1.0})) as judge:
        judge.journal = Journal(database, images=kept)
        judge.for_split("train")(rows, samples).result()
        query = "SELECT picture FROM samples WHERE picture != '' ORDER BY group_id, slot"
        names = [name for (name,) in database._connection.execute(query)]
    for name, sample in zip(names, [samples[0], *samples[2:]], strict=True):
        found = kept.read(name)
        assert found is not None
        assert image_hash(found) == image_hash(sample.image)
    kept.path(names[0]).write_bytes(kept.path(names[1]).read_bytes())
    assert kept.read(names[0]) is None
    kept.path(names[1]).write_bytes(b"cut")
    assert kept.read(names[1]) is None
    image = PIL.Image.frombytes("L", (64, 64), random.Random(0).randbytes(64 * 64))
    digest = image_hash(image)
    kept.save(digest, image)
    damaged = bytearray(kept.path(digest).read_bytes())
    # The chunk of the pixels seems to be shorter, so the name of the next chunk is read from the middle of the pixels.
    damaged[33:37] = (int.from_bytes(damaged[33:37]) // 2).to_bytes(4)
    kept.path(digest).write_bytes(damaged)
    assert kept.read(digest) is None
    black = PIL.Image.new("RGB", (4, 6))
    speck = black.copy()
    speck.putpixel((3, 5), (0, 0, 1))
    others = [None, speck, PIL.Image.new("RGB", (6, 4)), PIL.Image.new("L", (4, 18)), PIL.Image.new("RGB", (2, 12))]
    assert image_hash(black) == image_hash(black.copy())
    assert len({image_hash(image) for image in [black, *others]}) == 6


def test_policys_own_faults_are_not_scored_and_are_counted_at_every_replay(start):
    rows, reward = batch(), Counting()
    samples = [Sample(sample.task, None if row % 2 else sample.image) for row, sample in enumerate(pictures(rows))]
    first = start(reward)(rows, samples)
    assert first.faults == 3
    assert first.scores["quality"][1::2].tolist() == [-1.0] * 3
    assert equal(start(reward)(rows, samples), first)
    assert len(reward.asked) == 3


@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
@settings(max_examples=10)
def test_finite_floats_are_recalled_bitwise(tmp_path_factory, patterns):
    """Also zeros of both signs and subnormal numbers. NaN is recalled as NaN; an infinity is stored but never recalled."""
    special = [0x0000_0000, 0x8000_0000, 0x0000_0001, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000]
    column = torch.tensor([struct.unpack("<f", struct.pack("<I", pattern))[0] for pattern in [*special, *patterns]])
    rows = batch(groups=1, slots=len(column))
    path = tmp_path_factory.mktemp("floats") / "ledger.sqlite"
    journal = Journal(Database(path))
    journal.database._connection.execute("PRAGMA synchronous = OFF")
    journal.record(rows_of(rows), {"any": column})
    journal.database.close()
    again = Journal(Database(path))
    known, scores = again.recall(rows_of(rows), ["any"])
    with again.database.reading() as connection:
        stored = [
            decode_scores(text)["any"] for (text,) in connection.execute("SELECT scores FROM samples ORDER BY group_id, slot")
        ]
    again.database.close()
    finite = column.isfinite()
    assert torch.equal(known, ~column.isinf())
    assert same(scores["any"][finite].float(), column[finite])
    assert torch.equal(scores["any"][finite], column[finite].double())
    assert scores["any"][~finite].isnan().all()
    assert same(torch.tensor(stored)[~column.isnan()], column[~column.isnan()])
    assert torch.equal(torch.tensor(stored).isnan(), column.isnan())


def test_a_damaged_ledger_or_one_of_another_format_raises(tmp_path):
    (tmp_path / "damaged.sqlite").write_bytes(b"this is no database, and yet it is long enough to be taken for one" * 50)
    with closing(sqlite3.connect(tmp_path / "old.sqlite")) as database:
        database.execute("PRAGMA user_version = 1")
    for name, says in (
        ("damaged", r"sqlite cannot be used: .*move it away"),
        ("old", "format 1, but this version of Retouch reads 2"),
    ):
        with pytest.raises(ValueError, match=says):
            Database(tmp_path / f"{name}.sqlite")


def test_a_full_disk_raises_and_keeps_earlier_rows(tmp_path):
    rows, large = batch(), batch(4, slots=200)
    with closing(Database(ledger_path(tmp_path, 0))) as database:
        journal, connection = Journal(database), database._connection
        journal.record(rows_of(rows), {"quality": torch.zeros(6)})
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(ValueError, match="disk is full"):
            journal.record(rows_of(large), {"quality": torch.zeros(400)})
        assert journal.recall(rows_of(rows), ["quality"])[0].all()
        assert not journal.recall(rows_of(rows), ["quality", "notes"])[0].any()  # without a requested column
        assert not journal.recall(rows_of(large), ["quality"])[0].any()
        connection.execute("PRAGMA max_page_count = 100000")
        journal.record(rows_of(large), {"quality": torch.zeros(400)})
        assert journal.recall(rows_of(large), ["quality"])[0].all()
