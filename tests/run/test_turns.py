"""Editing in several turns: each turn edits the image of the turn before, and learns from its own return."""

import json
import math
import shutil
import threading

import pytest
import torch
from PIL import Image

import tiny_loop
import tiny_policies as tiny
from retouch.core.advantages import group_relative, turn_returns
from retouch.distributed.ranks import Ranks
from retouch.policies.rollout import EditingTurns
from retouch.recipe.recipe import load
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.build import assemble
from retouch.run.evaluation import build_evaluator
from retouch.run.session import run
from retouch.run.step import collect, update
from retouch.run.turns import last_images, play, require_turns
from retouch.types import Batch, Codes, Task
from retouch_worlds.playground.scenes import Scene, apply
from retouch_worlds.playground.texts import edits_of

RECIPE = "recipes/playground/edits-in-turns.jsonnet"
SMALL = [
    *("device=cpu", "steps=3", "tasks_per_step=3", "group_size=4", "minibatches=2", "trackers=[]", "samples.every=0", "seed=5"),
    *("eval.tasks=3", "eval.batch=4", "eval.num_steps=1", "checkpoints.every=1", "checkpoints.keep=9"),
    *("rollout.chunk=5", "rollout.num_steps=3"),
    *("data.complexity=[1,2,3]", "eval.complexity=[1,2,3]", "policy.ema=null"),
    *("rollout.turns.discount=0.5", "rollout.turns.end=2.0"),
]
GRPO = [
    'objective={"kind":"policy_gradient","clip_low":1e-4,"clip_high":1e-4}',
    'rollout.transition={"kind":"sde","noise_level":0.7}',
]
BRIEF = ["tasks_per_step=2", "group_size=2", "minibatches=1", "rollout.num_steps=2"]
"""A complete run, of which only the form is checked."""
NAN = math.nan
SHORT = [
    *("device=cpu", "steps=2", "tasks_per_step=2", "group_size=4", "trackers=[]", "samples.every=0", "seed=8", "policy.ema=null"),
    *("eval.tasks=2", "eval.complexity=null", "eval.headline=null", "eval.best_of_k=0"),
    *("checkpoints.every=1", "checkpoints.keep=9"),
    *('data={"kind":"playground","turns":true,"count":9,"complexity":[1,3]}', 'rollout.turns={"most":3}', "rollout.temperature=2"),
]
WRITERS = {"image tokens": "playground/image-tokens-unfinished", "prompts": "qwen-image-edit/writer-grpo-frozen-playground"}
LOADING = threading.Lock()  # transformers loads one model at a time


def recipe(tmp_path, *changes):
    return load(RECIPE, [*SMALL, f"out={tmp_path}", *changes])


def test_the_return_of_a_turn_has_its_own_reward_the_later_ones_and_that_of_the_whole_episode():
    rewards = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 9.0], [1.0, NAN, 3.0], [1.0, 2.0, 3.0], [5.0, NAN, NAN]])
    whole, turns = torch.tensor([10.0, 10.0, 10.0, NAN, 4.0]), torch.tensor([3, 2, 3, 3, 1])
    found = turn_returns(rewards, whole, turns, discount=0.5, end=2.0)
    first = [1 + 0.5 * 2 + 0.25 * 3 + 0.25 * 20, 2 + 0.5 * 3 + 0.5 * 20, 3 + 20]
    wanted = [first, [1 + 0.5 * (2 + 20), 2 + 20, NAN], [NAN, NAN, 3 + 20], [NAN, NAN, NAN], [5 + 8, NAN, NAN]]
    torch.testing.assert_close(found, torch.tensor(wanted), equal_nan=True)
    alone = turn_returns(rewards, whole, turns, discount=0.0, end=0.0)  # a reward that has no weight may be missing
    torch.testing.assert_close(alone, rewards.where(rewards < 9, NAN), equal_nan=True)
    assert EditingTurns(most=2, discount=0.5, end=2.0).bounds(-1.0, 10.0) == (-3.0, 30.0)


def collected(ranks, tmp_path, *changes):
    """A step of a run, with what its chunk was judged for."""
    with LOADING:
        parts, seen = assemble(recipe(tmp_path, *changes), ranks), []

    def judge(batch, samples):
        seen.append((batch, samples))
        return parts.judge.submit(samples)

    stepper = parts.stepper()
    at, phase = parts.phase(0, stepper=stepper, judge=judge)
    return parts, at, phase, collect(at, phase, 0), seen


def test_each_turn_edits_the_image_of_the_turn_before_and_is_compared_with_the_same_turn_of_its_task(tmp_path):
    parts, at, phase, found, seen = collected(Ranks(), tmp_path, *GRPO, "seed=8")
    tasks, batch = phase.batch(0).tasks, found.batch
    counts = [len(task.turns) for task in tasks]
    assert set(counts) == {1, 2, 3}
    places = {(number, slot): row for row, (number, slot) in enumerate(zip(batch.group_ids, batch.slot, strict=True))}
    assert len(places) == 3 * 3 * 4
    rewards = torch.full((12, 4), NAN, dtype=torch.float64)  # (row, turns and the whole)
    keys = set()
    for scored, samples in seen:
        judged = parts.judge.submit(samples).result()
        for row, (group, slot) in enumerate(zip(scored.group, scored.slot, strict=True)):
            number = scored.group_ids[group]
            keys.add((number, slot))
            task, turn = (-1 - number, 3) if number < 0 else divmod(number, 3)
            rewards[4 * task + slot, turn] = judged.rewards[row]
            image = places[3 * task + (counts[task] - 1 if turn == 3 else turn), slot]
            assert samples[row].image is found.images[image]
            assert samples[row].task.id == (tasks[task].id if turn == 3 else f"{tasks[task].id}/turn-{turn + 1}")
    assert len(keys) == 4 * (sum(counts) + 3), "every sample has its own place in the ledger"
    for (number, slot), row in places.items():
        task, turn = divmod(number, 3)
        before = tasks[task].images[0] if turn == 0 else found.images[places[number - 1, slot]]
        if turn < counts[task]:
            assert batch.tasks[row].images[0].tobytes() == before.tobytes()
    lengths = torch.tensor([count for count in counts for _ in range(4)])
    returns = turn_returns(rewards[:, :3], rewards[:, 3], lengths, discount=0.5, end=2.0)
    for number in range(9):
        rows, (task, turn) = [places[number, slot] for slot in range(4)], divmod(number, 3)
        wanted = group_relative(returns[4 * task : 4 * task + 4, turn], torch.zeros(4, dtype=torch.long)).float()
        torch.testing.assert_close(found.advantages[rows, 0], wanted)
        there = turn < counts[task]
        assert found.valid[rows].tolist() == [there] * 4
        assert found.trajectory.mask[rows].all().item() == found.trajectory.mask[rows].any().item() == there
        assert rows == [*range(rows[0], rows[0] + 4)] or number in (3, 4, 5), "only the second task is split over the minibatches"
    means = zip(("turn_1", "turn_2", "turn_3", "episode"), rewards.nanmean(dim=0).tolist(), strict=True)
    wanted = {"missing_fraction": 0, "fault_fraction": 0, "count": 4 * sum(counts), **dict(means)}
    assert {name: found.metrics[f"reward/{name}"] for name in wanted} == pytest.approx(wanted)
    assert update(at, phase, 0, found)["policy/ratio_max_first"] <= 1e-6


def test_two_ranks_that_share_a_group_learn_what_one_rank_does(tmp_path):
    def act(ranks):
        _, at, phase, found, _ = collected(ranks, tmp_path, *GRPO, "minibatches=1", "seed=8")
        metrics = {**found.metrics, **update(at, phase, 0, found)}
        advantages = zip(found.batch.group_ids, found.batch.slot, found.advantages[:, 0].tolist(), strict=True)
        return tiny_loop.gradient(at), {(number, slot): value for number, slot, value in advantages}, metrics

    (alone, wanted, metrics), both = act(Ranks()), tiny_loop.run_on_threads(2, act)
    assert sorted(key for _, advantages, _ in both for key in advantages) == sorted(wanted)
    for gradient, advantages, found in both:
        assert len(advantages) == 18
        assert advantages == pytest.approx({key: wanted[key] for key in advantages}, abs=1e-3)
        assert tiny.distance(gradient, alone) < 1e-4
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6, nan_ok=True)


def test_the_turn_after_one_without_an_image_edits_the_same_source_and_the_whole_has_the_image_of_its_last_turn():
    images = [Image.new("RGB", (4, 4), (level, 0, 0)) for level in range(6)]
    turns = tuple(Task(f"t/{number}", "edit") for number in range(3))
    tasks = (Task("long", "all", (images[0], images[5]), turns=turns), Task("short", "all", (images[1],), turns=turns[:2]))
    batch, made = Batch(0, 0, tasks, (7, 9), (0, 1), (0, 0)), iter([[images[2], None], [None, images[3]], [images[4], images[5]]])
    played = list(play(lambda rows: None, lambda asked, trajectory: next(made), batch, most=3))
    sources = [[images.index(task.images[0]) for task in turn.rows.tasks] for turn in played]
    assert sources == [[0, 1], [2, 1], [2, 3]]
    assert [turn.there for turn in played] == [[0, 1], [0, 1], [0]]
    assert [turn.rows.group_ids for turn in played] == [(21, 27), (22, 28), (23, 29)]
    assert last_images(played) == [images[4], images[3]]
    with pytest.raises(ValueError, match=r"task t/0 has 0 turns, and 1 to 2 are needed; add a column `later`"):
        require_turns(turns, most=2)
    stored = Task("t", "edit", (images[0], images[1]), meta={Codes.SOURCE: [[1]], "column": 2}).of_image(images[2])
    assert (stored.images, stored.meta) == ((images[2], images[1]), {"column": 2}), "stored tokens are those of the former image"


@pytest.mark.parametrize("actions", ["denoising", *WRITERS])
def test_a_run_trains_and_resumes_to_the_same_bits(tmp_path, actions):
    if actions == "denoising":
        made = recipe(tmp_path, "steps=2", *BRIEF, "data.complexity=[1,3]", "seed=8")
    else:
        made = load(f"recipes/{WRITERS[actions]}.jsonnet", [*SHORT, f"out={tmp_path}"])

    def stored(step):
        return checkpoint.load(made.folder / "checkpoints" / f"step-{step:06d}").tensors

    assert run(made, fresh=False) == 0
    lines = list(RunFolder(made.folder).read_metrics())
    assert all({"reward/turn_1", "reward/turn_3", "reward/episode"} <= line.keys() for line in lines)
    ends = {group: {name: each.clone() for name, each in tensors.items()} for group, tensors in stored(2).items()}
    assert any(not torch.equal(each, ends["weights"][name]) for name, each in stored(1)["weights"].items())
    shutil.rmtree(made.folder / "checkpoints" / "step-000002")
    assert run(made, fresh=False) == 0
    for group in ("weights", "optimizer", "copies"):
        assert all(torch.equal(each, ends[group][name]) for name, each in stored(2)[group].items())
    assert list(RunFolder(made.folder).read_metrics()) == lines


def test_held_out_tasks_are_played_in_turns_and_scored_as_whole_tasks(tmp_path):
    changes = ["eval.tasks=6", "eval.num_steps=3"]
    at_once = recipe(tmp_path, *changes, "eval.turns=false")
    in_turns = recipe(tmp_path, *changes, "rollout.turns=null", "eval.turns=true")
    parts = assemble(at_once, Ranks())
    judge, policy = lambda batch, samples: parts.judge.submit(samples), parts.policy(at_once.rollout)
    once, played = (build_evaluator(assemble(each, Ranks()), judge) for each in (at_once, in_turns))
    assert played.ceiling(policy).rewards.min() > 8, "the targets of the whole tasks"
    several = torch.tensor([task.tags["complexity"] != "1" for task in once.tasks])
    gain = (played(policy).rewards - once(policy).rewards)[several].mean()
    assert gain > 1, "the base model makes single edits well"
    small = ("rollout.turns=null", "steps=1", "tasks_per_step=1", "minibatches=1", "eval.best_of_k=2", "eval.guided_k=2")
    made = recipe(tmp_path, *changes, *small)
    assert run(made, fresh=False) == 0
    summary = json.loads((made.folder / "summary.json").read_text())
    untrained = {"edit by edit": played(policy), "guided by the reward": once.guided(policy, k=2)}
    wanted = {name: float(evaluated.scores["overall"].mean()) for name, evaluated in untrained.items()}
    assert summary["others"] == pytest.approx(wanted, rel=1e-4)
    assert summary["before"] < wanted["guided by the reward"]


def test_the_turns_of_the_playground_reach_the_target_and_no_scene_in_between_is_empty(tmp_path):
    parts = recipe(tmp_path, "data.complexity=[4]", "rollout.turns.most=4", "eval.complexity=[4]").data
    for task in parts.model_copy(update={"count": 40}).tasks():
        scene = Scene.from_json(task.meta["scene"])
        for turn in task.turns:
            assert Scene.from_json(turn.meta["scene"]) == scene
            scene = apply(scene, edits_of(turn))  # raises ValueError for an empty scene
        assert len(task.turns) == 4
        assert task.turns[-1].target.tobytes() == task.target.tobytes()
        assert task.copy().turns[0].target is not task.turns[0].target


def photos(folder, rows):
    folder.mkdir()
    lines = []
    for number, row in enumerate(rows):
        Image.new("RGB", (24, 24), (20 * number, 90, 90)).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", **row}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return [
        f"data={json.dumps({'kind': 'folder', 'path': str(folder), 'held_out': 2})}",
        'reward={"kind":"share","combine":{"share":1.0}}',
        *("eval.column=null", "eval.complexity=null", "steps=1", "eval.tasks=2"),
    ]


EDITS = ["remove the red circle", "make the blue square green", "add a pink circle at the centre"]


def test_own_rows_with_a_list_of_later_instructions_train_in_turns(tmp_path):
    rows = [{"instruction": EDITS[0], "later": EDITS[1 : 2 + number % 2]} for number in range(8)]
    made = recipe(tmp_path, *photos(tmp_path / "photos", rows), *BRIEF)
    parts = assemble(made, Ranks())
    tasks = sorted((*parts.sets[0].train, *parts.sets[0].heldout), key=lambda task: task.id)
    assert [turn.instruction for turn in tasks[1].turns] == EDITS
    assert tasks[1].instruction == "remove the red circle. make the blue square green. add a pink circle at the centre."
    assert [turn.id for turn in tasks[0].turns] == [f"{tasks[0].id}/turn-1", f"{tasks[0].id}/turn-2"]
    assert run(made, fresh=False) == 0
    (line,) = RunFolder(made.folder).read_metrics()
    assert {"reward/turn_3", "reward/episode"} <= line.keys()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"later": "then green"}, r"'later': should be a list of texts, the instructions of the further turns"),
        ({}, r"no turns; list the instructions of the further turns in a column `later`, or remove rollout.turns"),
        ({"later": ["a", "b", "c"]}, r"4 turns, and rollout.turns.most is 3; raise it \(at most 4\), or shorten `later`"),
    ],
)
def test_own_rows_with_a_wrong_number_of_turns_are_refused_before_a_model_is_loaded(tmp_path, row, problem):
    rows = [{"instruction": EDITS[0], "later": [EDITS[1]]} for _ in range(4)] + [{"instruction": EDITS[0], **row}]
    with pytest.raises(ValueError, match=problem):
        assemble(recipe(tmp_path, *photos(tmp_path / "photos", rows)), Ranks())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["data.turns=false"], "rollout.turns: the tasks of data have 0 to 0 turns, not 1 to 3; change `most`"),
        (["data.complexity=[1,4]"], "rollout.turns: the tasks of data have 1 to 4 turns, not 1 to 3; change `most`"),
        (["eval.guided_k=2"], "eval.guided_k: only a denoising policy can be guided by the reward, and not in turns; set it to 0"),
        (["rollout.turns=null", "eval.turns=true", "data.turns=false"], "eval.turns: the held-out tasks of playground have no"),
        (["policy.model.kind=playground-text-to-image"], "edits no source images; remove it"),
        (["policy.prompt_embeddings=cached"], "prompt_embeddings: the images of later turns are not known before the run"),
        (["rollout.staleness=1", *GRPO], "rollout.staleness: with turns, a step is sampled in that step"),
        ([*GRPO, 'rollout.window={"mode":"branch","size":1}'], "rollout.window: from the second turn on, the samples of"),
        (['objective={"kind":"dpo","beta":1.0}'], "rollout.turns: dpo does not learn from advantages of single samples"),
        (['objective={"kind":"supervised"}'], "rollout.turns: supervised samples nothing; remove it"),
        ([*GRPO, 'advantage={"kind":"gae"}'], "advantage.kind: gae does not compare the returns of one turn of a task"),
        (['advantage={"kind":"batch"}'], "advantage.kind: batch does not compare the returns of one turn of a task"),
        (['advantage={"kind":"gdpo","weights":{"overall":1}}'], "advantage.kind: gdpo does not compare the returns of"),
        (['data={"kind":"folder","path":"x"}', 'reward={"kind":"target","combine":{"target":1}}'], "reward.kind: target needs a"),
    ],
)
def test_settings_that_do_not_go_with_turns_are_refused(tmp_path, changes, problem):
    with pytest.raises(ValueError, match=problem):
        recipe(tmp_path, *changes)
