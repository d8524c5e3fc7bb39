"""`retouch ledger` on a run with real scores: the files of all ranks are read, and scoring again gives the same scores."""

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from retouch import cli
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import load
from retouch.records.folder import RunFolder, SampleRecord
from retouch.rewards.judging import RewardScorer
from retouch.rewards.ledger.database import Database, image_hash
from retouch.rewards.pixels import ShareReward
from retouch.rewards.scoring import score
from retouch.run.build import build_phase, build_sets
from retouch.run.ledger import Ledger, ledger_path
from retouch.types import Batch, Sample
from retouch_judge.cache import AnswerCache, JudgeCall
from retouch_rewards import measures
from retouch_view.ledger import LedgerSample, LedgerView, with_ratings
from retouch_view.rescoring import RunTasks
from retouch_worlds.rewards import PlaygroundReward

STEPS = 3
CALL = {"content": "c", "judge": "gpt, typed", "image": "p", "input_tokens": 1000, "output_tokens": 100, "seconds": 2.0}


def recipe(out):
    changes = {"name": "judged", "out": str(out), "device": "cpu", "tasks_per_step": 2, "group_size": 4, "steps": STEPS}
    changes |= {"eval.tasks": 6, "eval.headline": None, "eval.complexity": [1, 2], "minibatches": 1}
    return load("recipes/playground/grpo.jsonnet", [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def noisy_mix(sample_of, *key):
    """An image between the source and the target, with noise."""
    draw = np.random.default_rng(key)
    source, target = (np.asarray(image, dtype=float) for image in (sample_of.images[0], sample_of.target))
    share = draw.uniform()
    mixed = (1 - share) * source + share * target + draw.normal(0, 9, source.shape)
    return Image.fromarray(mixed.clip(0, 255).astype(np.uint8))


def batches(made):
    """The batch of each step of the run, and a batch of its held-out tasks."""
    (phase,) = made.resolved_phases()
    sets = build_sets(made, phase.data, size=None)
    built = build_phase(made, phase, steps=range(STEPS), tasks=sets.train, ranks=Ranks(), reward_range=(0.0, 1.0))
    tasks = tuple(sets.heldout[index] for index in range(6))
    return [built.batch(step) for step in range(STEPS)], Batch(0, -1, tasks, tuple(range(6)), tuple(range(6)), (0,) * 6)


def judge_run(made, *, keep_images):
    """Scores three steps and an evaluation; in the second step one image could not be rendered."""
    folder = RunFolder(made.folder)
    folder.write_recipe(made.document())
    training, heldout = batches(made)
    with closing(Ledger(folder.root, Ranks(), keep_images=keep_images, new_judge=False)) as ledger:
        reward = ledger.cached(PlaygroundReward())
        ledger.require_same_judge(reward)
        judge = RewardScorer(reward, {"overall": 1.0})
        ledger.attach(judge, since=0)
        for batch in training:
            samples = [
                Sample(batch.tasks[group], noisy_mix(batch.tasks[group], batch.step, group, slot))
                for group, slot in zip(batch.group, batch.slot, strict=True)
            ]
            if batch.step == 1:
                samples[3] = Sample(samples[3].task, None)
            judge.for_split("train")(batch, samples).result()
            if batch.step == 1:
                scores = judge(samples)
                run_all_images = [
                    SampleRecord(sample=sample, group=0, slot=slot, scores={}, reward=scores.rewards[slot].item())
                    for slot, sample in enumerate(samples[:4])
                ]
                folder.write_samples(2, "group", run_all_images)
        pictures = [Sample(task, noisy_mix(task, 77, number)) for number, task in enumerate(heldout.tasks)]
        judge.for_split("heldout", 0)(heldout, pictures).result()
        judge.close()
    return folder.root


@pytest.fixture(scope="module")
def run_all_images(tmp_path_factory):
    """A run that stored all images."""
    return judge_run(recipe(tmp_path_factory.mktemp("run_all_images")), keep_images=True)


@pytest.fixture(scope="module")
def run_logged_images(tmp_path_factory):
    """A run that stored only the images of its logged samples, as every run does."""
    return judge_run(recipe(tmp_path_factory.mktemp("run_logged_images")), keep_images=False)


@pytest.fixture
def ask(capsys):
    def run(*words):
        assert cli.main(["ledger", *map(str, words), "--json"]) == 0
        as_json = json.loads(capsys.readouterr().out)
        assert cli.main(["ledger", *map(str, words)]) == 0
        table = capsys.readouterr().out
        assert table.strip()
        return as_json

    return run


def column(run, name, split="train"):
    return [sample.scores[name] for sample in LedgerView.open(run).samples if sample.split == split]


def test_the_summary_lists_samples_steps_images_and_judges(run_all_images, run_logged_images, ask):
    found = ask(run_all_images)
    assert {split: each["samples"] for split, each in found["samples"].items()} == {"heldout": 6, "train": 24}
    train = found["samples"]["train"]
    assert (train["steps"], train["without_image"], train["stored_images"]) == ([1, 3], 1, 23)
    assert "overall" not in train["missing"]
    assert any(name.startswith("success/") for name in train["missing"])
    (judge,) = found["judges"]
    assert (judge["about"]["kind"], judge["since"]) == ("playground", 0)
    assert (found["asked"], found["cost"]) == ([], None)
    few = ask(run_logged_images, "cost")["samples"]
    assert (few["train"]["stored_images"], few["train"]["steps_with_images"], few["heldout"]["stored_images"]) == (3, [2], 0)


def test_cost_adds_recorded_costs_and_uses_given_prices_for_the_other_calls(tmp_path, ask):
    run = judge_run(recipe(tmp_path), keep_images=False)
    with closing(Database(ledger_path(run, 0))) as first, closing(Database(ledger_path(run, 1))) as second:
        AnswerCache(first).record([JudgeCall(**CALL, scores=None, fault="HTTP 503")])
        assert ask(run)["cost"] is None, "unknown, which is not zero"
        assert ask(run, "--prices", "1,1")["cost"] == pytest.approx(1100 / 1e6)
        AnswerCache(first).record([JudgeCall(**CALL, scores={"x": 1.0}, attempts=2, cost=0.5)])
        AnswerCache(second).record([JudgeCall(**CALL, scores={"x": 1.0}, cost=0.25)])
    found = ask(run)
    (asked,) = found["asked"]
    assert {name: asked[name] for name in ("calls", "failed", "attempts")} == {"calls": 3, "failed": 1, "attempts": 4}
    assert (asked["input_tokens"], asked["output_tokens"], asked["cost"], found["cost"]) == (3000, 300, 0.75, 0.75)
    assert ask(run, "cost", "--prices", "2,8")["cost"] == pytest.approx(0.75 + (1000 * 2 + 100 * 8) / 1e6)


def test_rescore_with_the_same_judge_gives_the_same_scores(run_all_images, ask):
    again = ask(run_all_images, "rescore", "playground", "--name", "twin")
    assert (again["samples"], again["judged"], again["without_image"]) == (30, 29, 1)
    for sample in LedgerView.open(run_all_images).samples:
        if sample.image:
            first = [sample.scores[name] for name in PlaygroundReward.columns]
            assert np.array_equal(first, [sample.scores[f"twin:{name}"] for name in PlaygroundReward.columns], equal_nan=True)
    assert ask(run_all_images, "agree", "overall", "twin:overall")["kendall"] == pytest.approx(1)


def test_rescore_with_another_judge_scores_each_stored_image_once(run_all_images, ask, monkeypatch):
    ask(run_all_images, "rescore", "share:red", "--split", "train", "--steps", "1:2")
    shown = {image_hash(Image.open(path)): path for path in (run_all_images / "pictures").rglob("*.png")}
    rows = [sample for sample in LedgerView.open(run_all_images).samples if "share-red:share" in sample.scores]
    assert {(sample.split, sample.step) for sample in rows} == {("train", 1), ("train", 2)}
    assert len(rows) == 15
    for sample in rows:
        red = score(ShareReward(), Image.open(shown[sample.image]))["share"]
        assert sample.scores["share-red:share"] == pytest.approx(red)
    asked = []

    def count(self, samples):
        asked.extend(samples)
        return {"share": torch.ones(len(samples))}

    monkeypatch.setattr(ShareReward, "__call__", count)
    assert ask(run_all_images, "rescore", "share:red", "--split", "train")["judged"] == 23
    assert len(asked) == 8  # those of step 3


def test_rescore_scores_samples_with_missing_scores_again_and_whole_groups_if_the_reward_compares_them(
    run_all_images, ask, monkeypatch
):
    asked = []

    def half_missing(self, samples):
        asked.extend(samples)
        return {"share": torch.tensor([0.5 if row % 2 or len(asked) > 16 else torch.nan for row in range(len(samples))])}

    monkeypatch.setattr(ShareReward, "__call__", half_missing)
    words = ["rescore", "share:red", "--split", "train"]
    ask(run_all_images, *words, "--name", "broken", "--steps", "1:2")
    known = [sample.scores["broken:share"] for sample in LedgerView.open(run_all_images).samples if "broken:share" in sample.scores]
    assert (len(asked), len(known)) == (15 + 8, 15)
    assert not np.isnan(known).any()
    asked.clear()

    def first_missing(self, samples):
        asked.append([sample.task.id for sample in samples])
        return {"share": torch.tensor([torch.nan if len(asked) == 1 and row == 0 else 0.5 for row in range(len(samples))])}

    monkeypatch.setattr(ShareReward, "__call__", first_missing)
    monkeypatch.setattr(ShareReward, "compares_groups", True)
    ask(run_all_images, *words, "--name", "compared", "--steps", "1:1")
    assert [len(tasks) for tasks in asked] == [8, 4]
    assert asked[1] == asked[0][:4]


def test_without_keep_images_only_images_of_stored_samples_are_rescored(run_logged_images, ask, capsys):
    again = ask(run_logged_images, "rescore", "playground", "--split", "train")
    assert (again["judged"], again["steps"], again["without_image"]) == (3, [2], 21)
    rows = [sample for sample in LedgerView.open(run_logged_images).samples if "playground:overall" in sample.scores]
    assert all(sample.scores["playground:overall"] == sample.scores["overall"] for sample in rows)
    assert cli.main(["ledger", str(run_logged_images), "rescore", "playground", "--split", "heldout"]) == 2
    assert "keep_images" in capsys.readouterr().err


def test_neither_an_image_with_the_wrong_content_nor_a_run_whose_data_have_changed_is_rescored(tmp_path, ask, capsys):
    made = recipe(tmp_path)
    run = judge_run(made, keep_images=True)
    one, other, *_ = sorted((run / "pictures").rglob("*.png"))
    one.write_bytes(other.read_bytes())
    again = ask(run, "rescore", "playground")
    assert (again["judged"], again["without_image"]) == (28, 2)
    document = made.document()
    document["data"]["seed"] = 99
    RunFolder(run).write_recipe(document)
    assert cli.main(["ledger", str(run), "rescore", "playground"]) == 2
    assert "use the data of the run" in capsys.readouterr().err


def test_a_rating_of_an_image_of_several_tasks_is_rejected_unless_it_names_the_sample(run_all_images, tmp_path):
    one, other = [sample for sample in LedgerView.open(run_all_images).samples if sample.split == "train" and sample.slot == 0][:2]
    assert one.task != other.task
    samples = [one, replace(other, image=one.image)]
    file = tmp_path / "ratings.csv"
    file.write_text(f"sha256,rating\n{one.image},3\n")
    with pytest.raises(ValueError, match=r"line 2: the image .* was made for 2 tasks; name its sample by step, group and slot"):
        with_ratings(samples, file, run_all_images)
    file.write_text(f"step,group,slot,rating\n{one.step},{one.group},{one.slot},3\n")
    assert [sample.place for sample in with_ratings(samples, file, run_all_images)] == [one.place]


def test_agree_reports_the_rank_correlations_of_the_two_columns(run_all_images, ask):
    found = ask(run_all_images, "agree", "IF", "PQ", "--split", "train")
    a, b = (torch.tensor(column(run_all_images, name)) for name in ("IF", "PQ"))
    group = torch.arange(24) // 4
    assert found["spearman"] == pytest.approx(measures.spearman(a, b))
    assert found["kendall"] == pytest.approx(measures.kendall(a, b))
    share, pairs = measures.pairwise_agreement(a, b, group)
    assert (found["within_groups"]["same_order"], found["within_groups"]["pairs"]) == (pytest.approx(share), pairs)
    assert found["samples"] == 24


def test_worst_sorts_samples_by_rank_difference_and_names_their_images(run_all_images, ask):
    found = ask(run_all_images, "worst", "IF", "IP", "--split", "train", "--top", "24")
    a, b = (torch.tensor(column(run_all_images, name)) for name in ("IF", "IP"))
    apart = (measures.ranks(a) - measures.ranks(b)).abs() / 23
    assert [each["rank_difference"] for each in found] == pytest.approx(sorted(apart.tolist(), reverse=True))
    first = found[0]
    assert (first["IF"], first["IP"]) == (a[apart.argmax()].item(), b[apart.argmax()].item())
    for each in found:
        if each["sha256"]:
            assert image_hash(Image.open(each["file"])) == each["sha256"]
    assert len(ask(run_all_images, "worst", "IF", "IP", "--top", "5")) == 5


def test_ratings_identify_images_by_hash_by_file_or_by_step_group_and_slot(run_all_images, ask, tmp_path):
    rows = [sample for sample in LedgerView.open(run_all_images).samples if sample.split == "train" and sample.image][:6]
    rated = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
    scores = torch.tensor([sample.scores["overall"] for sample in rows])
    wanted = measures.spearman(scores, torch.tensor(rated))
    shown = {image_hash(Image.open(path)): path for path in (run_all_images / "pictures").rglob("*.png")}
    files = {
        "sha256": [f"{sample.image}," for sample in rows],
        "image": [f"{shown[sample.image].relative_to(run_all_images)}," for sample in rows],
        "step,group,slot": [f"{sample.step},{sample.group},{sample.slot}," for sample in rows],
    }
    for header, about in files.items():
        file = tmp_path / "ratings.csv"
        lines = [f"{who}{rating}" for who, rating in zip(about, rated, strict=True)]
        # Two more ratings of the first image do not change its mean.
        lines += [f"{about[0]}{rated[0] - 1}", f"{about[0]}{rated[0] + 1}"]
        file.write_text("\n".join([f"{header},rating", *lines]) + "\n")
        found = ask(run_all_images, "agree", "overall", "--ratings", file)
        assert found["columns"] == ["overall", "rating"]
        assert (found["samples"], found["spearman"]) == (6, pytest.approx(wanted))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step,group,rating\n1,0,3\n", "it needs `rating`"),
        ("step,group,slot,rating\n1,0,0,3\n9,0,0,3\n", "line 3: the run scored no sample of step 9"),
        ("step,group,slot,rating\n1,0,0,good\n", "line 2: could not convert"),
        ("step,group,slot,rating\n1,0,0,nan\n", "not a finite number"),
        ("image,rating\n../nothing.png,3\n", "no file ../nothing.png"),
        ("image,rating\na.png\n", "line 2: `rating` is empty"),
        ("sha256,rating\n,3\n", "line 2: `sha256` is empty"),
        ("sha256,rating\n\n\nabc,3\n", "line 4: the run scored no image abc"),
        (f"sha256,rating\nabc,{'3' * 140_000}\n", "line 2: field larger than field limit"),
        (f"sha256,{'r' * 140_000}\nabc,3\n", "line 1: field larger than field limit"),
        ("image,rating\nratings.csv,3\n", "line 2: ratings.csv cannot be read as an image"),
        (b"sha256,rating,note\nabc,3,caf\xe9\n", "ratings.csv is not UTF-8 text"),
    ],
)
def test_an_invalid_ratings_file_is_rejected_with_the_reason(run_all_images, tmp_path, capsys, text, says):
    file = tmp_path / "ratings.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["ledger", str(run_all_images), "agree", "overall", "--ratings", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_invalid_arguments_of_ledger_commands_are_rejected_with_the_reason(run_all_images, tmp_path, capsys):
    run = str(run_all_images)
    assert cli.main(["ledger", run, "rescore", "share:green", "--name", "mine", "--steps", "3"]) == 0
    for words, says in (
        ([run, "agree", "overall", "nothing"], "no column 'nothing' in these samples; the columns are IF"),
        ([run, "agree", "overall"], "give either a second column"),
        ([run, "worst", "IF", "PQ", "--steps", "99"], "no column 'IF'"),
        ([run, "rescore", "playgroun"], "playgroun"),
        ([run, "rescore", "share:red", "--name", "../x"], "cannot be a name"),
        ([run, "rescore", "photos:red", "--name", "mine"], "scores of another reward"),
        ([str(tmp_path)], "has no ledger.sqlite"),
    ):
        assert cli.main(["ledger", *words]) == 2
        assert says in capsys.readouterr().err


def test_ledger_files_of_all_ranks_are_merged_and_later_scores_replace_earlier_ones(tmp_path, ask):
    run = judge_run(recipe(tmp_path), keep_images=False)
    training, _ = batches(recipe(tmp_path))
    batch = training[2]
    half_missing = batch.take(slice(4, 8))  # the second group, as another rank would score it
    with closing(Ledger(run, Ranks(rank=1), keep_images=False, new_judge=False)) as ledger:
        judge = RewardScorer(PlaygroundReward(), {"overall": 1.0})
        ledger.attach(judge, since=0)
        judge.for_split("train")(half_missing, [Sample(half_missing.tasks[0], half_missing.tasks[0].target)] * 4).result()
        judge.for_split("train", 3)(half_missing, [Sample(half_missing.tasks[0], half_missing.tasks[0].target)] * 4).result()
        judge.close()
    view = LedgerView.open(run)
    assert [file.name for file in view.files] == ["ledger.sqlite", "ledger.rank1.sqlite"]
    assert ask(run)["samples"]["train"] | {"seconds": 0} == {
        **{"samples": 28, "steps": [1, 4], "without_image": 1, "missing": ask(run)["samples"]["train"]["missing"]},
        **{"seconds": 0, "stored_images": 3, "steps_with_images": [2]},
    }
    later = [sample.scores["exact"] for sample in view.samples if (sample.step, sample.group) == (3, 1)]
    assert later == [1.0] * 4


def test_tasks_of_refilled_groups_are_those_that_training_drew():
    made = load("recipes/playground/grpo.jsonnet", ["device=cpu", "tasks_per_step=2", "steps=3", 'rollout.refill={"rounds": 2}'])
    (phase,) = made.resolved_phases()
    sets = build_sets(made, phase.data, size=None)
    built = build_phase(made, phase, steps=range(STEPS), tasks=sets.train, ranks=Ranks(), reward_range=(0.0, 1.0))
    tasks = RunTasks(made)
    for step in range(STEPS):
        drawn = [*built.batch(step).tasks, *(task for turn in (1, 2) for task in built.source.keywords["further"](step, turn))]
        for group, task in enumerate(drawn):
            place = ("train", step + 1, group, 0)
            sample = LedgerSample(*place, task.id, "", None, judge="", scores={}, seconds=0.0, at=0.0)
            assert tasks(sample).id == task.id
        assert len(drawn) == 6


FINITE, INFINITE = '{"gpt": 0.5}', '{"gpt": 1e999}'


def add_infinite_scores(run):
    """Adds three answers and three samples to the ledger; one of each has an infinite score."""
    path = ledger_path(run, 0)
    with closing(Database(path)) as database:
        AnswerCache(database).record(
            [JudgeCall(**{**CALL, "content": f"c{k}", "image": f"{k:064x}"}, scores={"gpt": 0.5}) for k in range(3)]
        )
        with database.writing() as connection:
            for k in range(3):
                row = ("train", k, 0, 0, f"t{k}", f"{k:064x}", None, "gpt, typed", INFINITE if k == 1 else FINITE, 1.0, 1.0)
                connection.execute(f"INSERT INTO samples VALUES (?{', ?' * 10})", row)
            connection.execute("UPDATE answers SET scores = ? WHERE content = 'c1'", (INFINITE,))
    return run


def steps_and_answers(run):
    """The steps with scores, and the contents whose stored answers are not discarded."""
    with closing(Database(ledger_path(run, 0))) as database, database.reading() as connection:
        steps = [step + 1 for (step,) in connection.execute("SELECT step FROM samples ORDER BY step")]
        found = connection.execute("SELECT content FROM answers WHERE scores IS NOT NULL AND NOT fresh ORDER BY content")
        return steps, [content for (content,) in found]


@pytest.mark.parametrize(
    ("words", "steps", "contents"),
    [
        ([], [1, 3], ["c0", "c2"]), (["--image", f"{2:064x}"], [1, 2], ["c0", "c1"]),
        (["--steps", "1:1"], [2, 3], ["c1", "c2"]), (["--judge", "gpt, typed", "--steps", "2:3"], [1], ["c0"]),
        (["--split", "heldout"], [1, 2, 3], ["c0", "c1", "c2"]),
    ],
)  # fmt: skip
def test_expel_discards_the_selected_scores_and_keeps_the_recorded_calls(tmp_path, ask, words, steps, contents):
    run = add_infinite_scores(tmp_path)
    before = ask(run, "cost")["asked"]
    ask(run, "expel", *words, "--dry-run")
    assert steps_and_answers(run) == ([1, 2, 3], ["c0", "c1", "c2"])
    found = ask(run, "expel", *words)
    assert steps_and_answers(run) == (steps, contents)
    assert (len(found["samples"]), len(found["answers"])) == (3 - len(steps), 3 - len(contents))
    after = ask(run, "cost")["asked"]
    assert [each["calls"] for each in after] == [each["calls"] for each in before]
    assert ask(run, "expel", *words)["answers"] == []


def test_expel_with_judge_and_steps_finds_the_answers_for_samples_of_those_steps(tmp_path, ask, capsys):
    """The samples of a reward that calls a judge store the fingerprint of the reward, which differs from that of the judge."""
    run = add_infinite_scores(tmp_path)
    with closing(Database(ledger_path(run, 0))) as database:
        assert set(AnswerCache(database).recall(["c0", "c1", "c2"])) == {"c0", "c2"}, "never an infinite score"
        with database.writing() as connection:
            connection.execute("UPDATE samples SET judge = 'a reward'")
    assert cli.main(["ledger", str(run), "expel", "--image", "%"]) == 2
    assert "hexadecimal" in capsys.readouterr().err
    found = ask(run, "expel", "--judge", "gpt, typed", "--steps", "2:3")
    assert (len(found["samples"]), len(found["answers"])) == (0, 2)
    assert steps_and_answers(run) == ([1, 2, 3], ["c0"])
