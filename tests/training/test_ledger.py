"""The ledger between a run and its judge: a run resumes only with the same judge; cached answers and usage totals."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from PIL import Image

from judge_double import on_panel
from retouch.distributed.ranks import Ranks
from retouch.protocols import Reward
from retouch.recipe.derived_facts import differences
from retouch.recipe.recipe import load
from retouch.rewards import identity
from retouch.rewards.function import FunctionReward
from retouch.rewards.judging import CompositeReward, RewardScorer
from retouch.rewards.ledger.database import Database
from retouch.rewards.pixels import PhotosReward, ShareReward
from retouch.run.ledger import Ledger
from retouch.types import Batch, Sample, Task
from retouch_judge.base import Panel
from retouch_judge.cache import AnswerCache, CachedJudgeClient, JudgeCall
from retouch_judge.questions import Answer
from retouch_judge.rewards import YesReward
from retouch_worlds.rewards import PlaygroundReward


class Fixed:
    """A judge client that always answers with the score 1; ``asked`` counts the questions."""

    def __init__(self, identity: str = "model a") -> None:
        self.identity = identity
        self.asked = 0

    def ask(self, questions):
        self.asked += len(questions)
        return [Answer(scores={"yes": 1.0}, text="yes", attempts=1) for _ in questions]


def start_run(run: Path, reward: Reward, *, since: int, new_judge: bool = False) -> list[tuple[str, int]]:
    """Start the run with this judge; return the fingerprint and the first step of every judge in the ledger."""
    with closing(Ledger(run, Ranks(), keep_images=False, new_judge=new_judge)) as ledger:
        kept = ledger.cached(reward)
        ledger.require_same_judge(kept)
        judge = RewardScorer(kept, dict.fromkeys(kept.columns, 1.0))
        ledger.attach(judge, since=since)
        judge.close()
        with ledger._database.reading() as connection:
            return connection.execute("SELECT fingerprint, since FROM judges ORDER BY number").fetchall()


def test_resume_with_a_changed_judge_raises_unless_new_judge_is_set(tmp_path: Path) -> None:
    first, second = on_panel(YesReward, Panel(Fixed("model a"))), on_panel(YesReward, Panel(Fixed("model b")))
    assert start_run(tmp_path, first, since=0) == start_run(tmp_path, first, since=5) == [(identity.fingerprint(first), 0)]
    with pytest.raises(ValueError, match=r"own: model a; .* in the run, model b; .* now\n.*--new-judge"):
        start_run(tmp_path, second, since=7)
    both = [(identity.fingerprint(first), 0), (identity.fingerprint(second), 7)]
    assert start_run(tmp_path, second, since=7, new_judge=True) == both
    assert start_run(tmp_path, second, since=9) == both
    with pytest.raises(ValueError, match="own: model b"):
        start_run(tmp_path, first, since=9)


def test_judge_with_changed_settings_class_or_rubric_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_run(tmp_path, on_panel(YesReward, Panel(Fixed())), since=0)
    panels = [Panel(Fixed(), repeats=2), Panel(Fixed(), temperature=0.5), Panel(Fixed(), seed=1)]
    others: list[Reward] = [on_panel(YesReward, panel) for panel in panels]
    others += [on_panel(YesReward, Panel(Fixed()), min_mass=0.6), CompositeReward({"a": on_panel(YesReward, Panel(Fixed()))})]
    for other in (*others, ShareReward()):
        with pytest.raises(ValueError, match="the judge is not the one"):
            start_run(tmp_path, other, since=1)
    monkeypatch.setattr("retouch_judge.base.rubric", lambda name: f"another {name}")
    with pytest.raises(ValueError, match="rubrics"):
        start_run(tmp_path, on_panel(YesReward, Panel(Fixed())), since=1)


def test_user_reward_with_changed_source_code_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's module that was edited between two starts."""

    class Mine(ShareReward):
        pass

    start_run(tmp_path, Mine(), since=0)
    monkeypatch.setattr("inspect.getsource", lambda module: "edited")
    with pytest.raises(ValueError, match=r"the code of test_ledger:.*Mine was changed"):
        start_run(tmp_path, Mine(), since=1)


def test_point_1_2_another_attribute_of_a_reward_is_another_judge_also_inside_a_composite(tmp_path: Path) -> None:
    def scaled(factor: float) -> FunctionReward:
        def bright(images: list[Image.Image], **kwargs: object) -> list[float]:
            return [factor for _ in images]

        return FunctionReward.of(bright)

    def both(factor: float) -> CompositeReward:
        return CompositeReward({"bright": scaled(factor), "share": ShareReward()})

    for folder, made in ((tmp_path / "alone", scaled), (tmp_path / "composite", both)):
        folder.mkdir()
        first = start_run(folder, made(1.0), since=0)
        assert start_run(folder, made(1.0), since=1) == first
        with pytest.raises(ValueError, match=r"the variable factor around test_ledger\S*bright was changed"):
            start_run(folder, made(0.25), since=2)
        assert len(start_run(folder, made(0.25), since=2, new_judge=True)) == 2


def test_packaged_reward_is_identified_by_its_version_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start_run(tmp_path, ShareReward(), since=0)
    monkeypatch.setattr("inspect.getsource", lambda module: "edited")
    monkeypatch.setattr(ShareReward, "__module__", "retouch.elsewhere")
    assert start_run(tmp_path, ShareReward(max_missing=0.5), since=1) == first
    with pytest.raises(ValueError, match=r"own: {'channel': 'red'} in the run, {'channel': 'blue'} now"):
        start_run(tmp_path, ShareReward(channel="blue"), since=1)
    monkeypatch.setattr(ShareReward, "version", 2)
    with pytest.raises(ValueError, match="version: 1 in the run, 2 now"):
        start_run(tmp_path, ShareReward(), since=1)


@pytest.mark.parametrize(
    ("reward", "digits"),
    [
        (ShareReward(), "83ee13154baa9271"),
        (PhotosReward(colour=(200, 30, 30)), "8e45d671ac31172b"),
        (PlaygroundReward(), "38293467dcaca87e"),
        (on_panel(YesReward, Panel(Fixed(), repeats=2, temperature=0.5), min_mass=0.6), "fae50c3f9054a137"),
        (CompositeReward({"a": on_panel(YesReward, Panel(Fixed())), "b": ShareReward()}), "e3f2420afd5f5dd2"),
    ],
    ids=["share", "photos", "playground", "yes", "several"],
)
def test_reward_fingerprints_equal_those_of_existing_runs(reward: Reward, digits: str) -> None:
    """A change here means that no existing run with this reward can continue without --new-judge."""
    assert identity.fingerprint(reward) == digits


class TwoRanks(Ranks):
    """The other rank reports that its judge has changed."""

    def any(self, flag: bool) -> bool:
        return True


def test_rank_raises_if_the_judge_changed_on_another_rank(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, TwoRanks(), keep_images=False, new_judge=False)
    with closing(ledger), pytest.raises(ValueError, match="another rank's message says how"):
        ledger.require_same_judge(ShareReward())


def test_cached_judge_scores_equal_images_once_and_keeps_its_identity(tmp_path: Path) -> None:
    asker = Fixed()
    reward = on_panel(YesReward, Panel(asker))
    before = identity.describe(reward)
    with closing(Ledger(tmp_path, Ranks(), keep_images=False, new_judge=False)) as ledger:
        kept = ledger.cached(reward)
        assert isinstance(reward.panel.client, CachedJudgeClient)
        assert identity.describe(kept) == before
        judge = RewardScorer(kept, {"yes": 1.0})
        ledger.attach(judge, since=0)
        task = Task("t", "make it blue", images=(Image.new("RGB", (4, 4)),))
        pictures = [Sample(task, Image.new("RGB", (4, 4), (value, 0, 0))) for value in (1, 2, 1)]
        batch = Batch(0, 0, (task,), (0,), (0, 0, 0), (0, 1, 2))
        judge.for_split("train")(batch, pictures).result()
        assert asker.asked == 2
        judge.for_split("heldout", 0)(batch, pictures).result()
        assert asker.asked == 2
        with ledger.cache.bypass():
            judge.for_split("canary", 0)(batch, pictures).result()
        assert asker.asked == 5
        judge.for_split("canary", 0)(batch, pictures).result()
        assert asker.asked == 5
        judge.close()


def call(content: str, *, rubric: str = "r", tokens: int = 100, cost: float | None) -> JudgeCall:
    amounts = {"attempts": 2, "input_tokens": tokens, "output_tokens": tokens // 10, "cost": cost}
    return JudgeCall(content=content, image="", judge="j", scores=None, rubric=rubric, **amounts)


def test_judge_usage_totals_accumulate_across_restarts(tmp_path: Path) -> None:
    usage: dict[str, float] = {}
    for start in range(2):
        with closing(Ledger(tmp_path, Ranks(), keep_images=False, new_judge=False)) as ledger:
            assert ledger.usage() == usage
            ledger.cache.record([call("a", cost=0.25)])
            ledger.cache.record([call("a", cost=0.5), call("server", rubric="", tokens=0, cost=None)])
            assert ledger.usage()["judge/cost"] == 0.75 * (start + 1)
            assert ledger.usage()["judge/requests"] == 4 * (start + 1)
            usage = {
                "judge/requests": 4,
                "judge/retries": 2,
                "judge/input_tokens": 200,
                "judge/output_tokens": 20,
                "judge/cost": 0.75,
            }


class FirstOfTwo(Ranks):
    """The first of two ranks; the other rank adds 0 to every sum."""

    def __init__(self) -> None:
        super().__init__(rank=0, world=2)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_judge_usage_includes_ledgers_of_ranks_that_no_longer_exist_and_of_suites(tmp_path: Path) -> None:
    """A damaged ledger is left out, and each rank has its own suites."""

    def record(name: str, cost: float) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with closing(Database(tmp_path / name)) as database:
            AnswerCache(database).record([call("a", cost=cost)])

    def usage(ranks: Ranks) -> object:
        with closing(Ledger(tmp_path, ranks, keep_images=False, new_judge=False)) as ledger:
            return ledger.usage()["judge/cost"]

    copies = [(name, 8.0) for name in ("ledger-copy.sqlite", "ledger.rank1-copy.sqlite", "ledger.rankx.sqlite")]
    for name, cost in (("ledger.sqlite", 0.25), ("ledger.rank1.sqlite", 0.5), ("ledger.rank2.sqlite", 1.0), *copies):
        record(name, cost)
    assert (usage(Ranks()), usage(FirstOfTwo())) == (1.75, 1.25)
    for name in ("one/ledger", "one/ledger.rank1", "two/ledger"):
        record(f"suites/{name}.sqlite", 0.25)
    assert usage(FirstOfTwo()) == 1.75  # only the ledgers of this rank
    (tmp_path / "suites" / "two" / "ledger.sqlite").write_bytes(b"damaged" * 1000)
    assert usage(FirstOfTwo()) == 1.5


def test_requests_without_a_known_price_are_counted_as_unpriced(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path, Ranks(), keep_images=False, new_judge=False)) as ledger:
        ledger.cache.record([call("a", cost=None)])
        unknown = {
            "judge/requests": 2,
            "judge/retries": 1,
            "judge/input_tokens": 100,
            "judge/output_tokens": 10,
            "judge/unpriced_requests": 2,
        }
        assert ledger.usage() == unknown
        ledger.cache.record([call("b", cost=0.0)])
        doubled = {name: 2 * value for name, value in unknown.items()}
        assert ledger.usage() == doubled | {"judge/unpriced_requests": 2, "judge/cost": 0.0}


def test_differences_ignore_keep_images_and_with_new_judge_also_the_reward() -> None:
    one = load("recipes/playground/grpo.jsonnet")
    assert "ledger" not in one.document()
    keeping = load("recipes/playground/grpo.jsonnet", ["ledger.keep_images=true"])
    assert keeping.document()["ledger"] == {"keep_images": True}
    assert differences(one, keeping) == differences(keeping, one) == []
    other = load("recipes/playground/grpo.jsonnet", ['reward.combine={"IF": 1}'])
    assert differences(one, other)
    assert differences(one, other, new_judge=True) == []
    assert differences(one, load("recipes/playground/grpo.jsonnet", ["seed=3"]), new_judge=True)
