"""The short audit before a benchmark: an honest judge is audited once, a useless one is rejected before anything is generated."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from PIL import Image

from canned_judge import CannedClient
from judge_double import KEY, Double
from retouch import cli
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.rewards.base import BudgetSpent, JudgeClients
from retouch.rewards.several import SeveralRewards
from retouch.run.session import run
from retouch_bench.kinds import find_suite
from retouch_judge import short_audit
from retouch_judge.audit_ladders import playground_ladders
from retouch_judge.audit_scores import Spending, ask
from retouch_judge.kinds import Endpoint, InProcess
from retouch_judge.models import JudgeQuota
from retouch_judge.rewards import AspectsReward, VieScore
from retouch_judge.short_audit import ITEMS, audit_judges, judge_models
from tiny_recipes import SMALL

MODEL = InProcess(path="not loaded")
TRUTHS = {
    (rung.sample.task.images[0].tobytes(), rung.sample.image.tobytes()): rung.truth
    for item in playground_ladders(ITEMS)
    for rung in item.rungs
    if rung.sample.image is not None and rung.truth is not None
}


def truth_of(question):
    """The truth of an edit; 1 for a question about the quality of an image alone."""
    images = [part.convert("RGB").tobytes() for part in question.parts if isinstance(part, Image.Image)]
    return TRUTHS[images[0], images[1]] if len(images) == 2 else 1.0


def answer(question, score):
    return {"reasoning": "", **dict.fromkeys(question.form.scales, score)}


JUDGES = {
    "honest": lambda question, _: answer(question, round(1 + 9 * truth_of(question))),
    "constant": lambda question, _: answer(question, 7),
    "unreadable": lambda question, _: "A fine picture, I would say." if 0 < truth_of(question) < 1 else answer(question, 3),
    "silent": lambda question, _: "",
    "reversed": lambda question, _: answer(question, round(10 - 9 * truth_of(question)) if len(question.parts) > 2 else 9),
}
REFUSED = {
    "constant": "it gives every image the same score, 0.70",
    "unreadable": "8 of 24 images got no score",
    "silent": "cannot be audited: no image of the first item got a score",
    "reversed": "it scores images without the edit no lower than images with the whole edit",
}


@pytest.fixture
def judge(monkeypatch, tmp_path):
    """A model that answers with ``reply``, with a state folder in ``tmp_path``."""
    client = CannedClient(JUDGES["honest"])
    monkeypatch.setattr(InProcess, "open", lambda self, *, device="cpu": client)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return client


def audit_notes(*, judge=MODEL):
    notes: list[str] = []
    audit_judges(VieScore(judge=judge), ranks=Ranks(), clients=JudgeClients("cpu"), note=notes.append)
    return notes


def test_an_honest_judge_passes_and_its_result_is_reused(judge):
    (said,) = audit_notes()
    assert "passes (24 images; mean score 1.00 with the whole edit and 0.32 without; 100% of pairs in the right order" in said
    asked = len(judge.asked)
    assert 24 < asked <= 48
    (again,) = audit_notes()
    assert "(earlier): passes (24 images" in again
    assert len(judge.asked) == asked
    audit_notes(judge=InProcess(path="another"))
    assert len(judge.asked) == 2 * asked


@pytest.mark.parametrize("kind", REFUSED)
def test_a_useless_judge_is_rejected_and_audited_again_once_it_is_corrected(judge, kind):
    judge.reply = JUDGES[kind]
    with pytest.raises(ValueError, match=REFUSED[kind]) as error:
        audit_notes()
    assert "--no-audit" in str(error.value)
    judge.reply = JUDGES["honest"]
    assert "passes" in audit_notes()[0]


def test_many_unreadable_answers_fail_the_audit_even_if_retries_gave_scores(judge, monkeypatch):
    """Each image has a score in the end, but every third answer could not be read."""

    def ask_twice(*args, **settings):
        attempts = Counter({"": 40, "unreadable reply": 20})
        return replace(ask(*args, **settings), spending=Spending(attempts))

    monkeypatch.setattr(short_audit, "ask", ask_twice)
    with pytest.raises(
        ValueError, match=r"0 of 24 images got no score and 20 of 60 answers could not be read \(20 unreadable reply\)"
    ):
        audit_notes()


@pytest.mark.parametrize(("worst", "kind"), [(1.0, ValueError), (2.0, BudgetSpent)])
def test_other_ranks_raise_the_same_error_type_as_the_first_rank(worst, kind):
    class Second(Ranks):
        def max(self, values):
            return torch.full_like(values, worst)

    with pytest.raises(ValueError, match="the log of the first rank says why") as error:
        audit_judges(VieScore(judge=MODEL), ranks=Second(rank=1, world=2), clients=JudgeClients("cpu"), note=print)
    assert error.type is kind


def test_judge_models_lists_each_model_of_a_reward_once(judge):
    assert list(judge_models(AspectsReward(judge=MODEL))) == [MODEL]
    both = SeveralRewards(rewards={"a": VieScore(judge=MODEL), "b": AspectsReward(judge=MODEL)})
    assert list(judge_models(both)) == [MODEL]


def words(tmp_path, *more):
    images = tmp_path / "images"
    images.mkdir(exist_ok=True)
    for item in find_suite("playground").items(None)[0]:
        Image.new("RGB", (24, 24)).save(images / f"{item.id.replace('/', '%2F')}.png")
    section = json.dumps({"kind": "viescore", "judge": MODEL.model_dump(mode="json")})
    return ["bench", "playground", "--images", str(images), "--judge", section, "--out", str(tmp_path / "out"), *more]


def test_a_benchmark_rejects_a_useless_judge_before_it_writes_files(judge, tmp_path, capsys):
    judge.reply = JUDGES["constant"]
    assert cli.main(words(tmp_path)) == 2
    assert "it gives every image the same score" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert cli.main(words(tmp_path, "--no-audit", "--subset", "2")) == 0
    assert "audit of the judge" not in capsys.readouterr().err
    asked = len(judge.asked)
    judge.reply = JUDGES["honest"]
    assert cli.main(words(tmp_path, "--subset", "2")) == 0
    assert "audit of the judge" in capsys.readouterr().err
    assert len(judge.asked) > asked


def test_a_run_refuses_a_useless_judge_of_its_suites_before_the_first_step(judge, tmp_path):
    judge.reply = JUDGES["reversed"]
    suite = {"suite": "playground", "subset": 2, "judge": {"kind": "viescore", "judge": MODEL.model_dump(mode="json")}}
    document = {**SMALL, "out": str(tmp_path), "eval": {"tasks": 4, "suites": [suite]}}
    with pytest.raises(ValueError, match="it scores images without the edit no lower"):
        run(parse(document), fresh=False)
    assert RunFolder(parse(document).folder).read_metrics() == []


def test_the_audit_counts_against_the_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Double() as server:
        monkeypatch.setenv("DOUBLE_KEY", KEY)
        monkeypatch.setenv("RETOUCH_KEYS", f"DOUBLE_KEY={server.url.removesuffix('/v1')}")
        model = Endpoint(model="double", base_url=server.url, key="DOUBLE_KEY", quota=JudgeQuota(calls=20))
        with pytest.raises(BudgetSpent, match="does not suffice for its audit"):
            audit_notes(judge=model)
        assert 0 < len(server.requests) <= 20
