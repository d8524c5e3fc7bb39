"""A writer and the image model that makes its images, trained together on the same groups."""

import json
import shutil

import pytest
import torch
from torch import Tensor

from retouch.core.advantages import group_relative
from retouch.distributed.ranks import Ranks
from retouch.inference.exporting import export_target
from retouch.inference.opening import open_policy, open_writer
from retouch.recipe.document import value_of
from retouch.recipe.recipe import load, parse
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.build import assemble
from retouch.run.session import run
from retouch.run.step import collect
from retouch.types import Completion
from slow_params import slow_after

JOINT = "recipes/playground/enhancer-joint.jsonnet"
SMALL = [
    *("device=cpu", "steps=4", "tasks_per_step=2", "group_size=4", "trackers=[]", "samples.every=0", "eval.tasks=2", "seed=5"),
    *("eval.best_of_k=0", "eval.batch=4", "eval.headline=null", "checkpoints.every=1", "checkpoints.keep=9"),
]


def recipe(tmp_path, *changes):
    return load(JOINT, [*SMALL, f"out={tmp_path}", *changes])


def stored(folder, step, group="weights") -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint: those of the writer and those of the image model."""
    found = checkpoint.load(folder / "checkpoints" / f"step-{step:06d}").tensors[group]
    return {
        "writer": {name: each.clone() for name, each in found.items() if not name.startswith("text_to_image/")},
        "text_to_image": {name: each.clone() for name, each in found.items() if name.startswith("text_to_image/")},
    }


def differ(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    assert first.keys() == second.keys() != set()
    return any(not torch.equal(each, second[name]) for name, each in first.items())


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """A run in which the writer trains in steps 1 and 3, and the image model in steps 2 and 4, with averages of every second."""
    turns = 'text_to_image.turns={"writer_steps":1,"image_steps":1}'
    made = recipe(tmp_path_factory.mktemp("joint"), turns, 'policy.ema={"decay":0.5,"every":2}')
    assert run(made, fresh=False) == 0
    return made


def test_in_turn_only_the_one_whose_turn_it_is_changes(joint):
    at = {step: stored(joint.folder, step) for step in (1, 2, 3, 4)}
    assert [differ(at[step]["writer"], at[step + 1]["writer"]) for step in (1, 2, 3)] == [False, True, False]
    assert [differ(at[step]["text_to_image"], at[step + 1]["text_to_image"]) for step in (1, 2, 3)] == [True, False, True]
    # An average follows the steps of its own model: every second of these, not of the run.
    kept = {step: stored(joint.folder, step, "copies") for step in at}
    assert [differ(kept[step]["writer"], kept[step + 1]["writer"]) for step in (1, 2, 3)] == [False, True, False]
    assert [differ(kept[step]["text_to_image"], kept[step + 1]["text_to_image"]) for step in (1, 2, 3)] == [False, False, True]
    lines = list(RunFolder(joint.folder).read_metrics())
    assert [("policy/loss" in line, "text_to_image/loss" in line) for line in lines] == [(True, False), (False, True)] * 2
    assert all(line["text_to_image/ratio_max_first"] <= 1e-6 for line in lines if "text_to_image/loss" in line)
    checks = [check for check in RunFolder(joint.folder).read_preflight() if check["text"].startswith("text_to_image: ")]
    assert {check["name"] for check in checks} >= {"ratio_before", "gradient", "moved", "ratio_after"}
    assert all(check["ok"] for check in checks)


def test_it_resumes_to_the_same_bits(joint):
    ends = [stored(joint.folder, 4, group) for group in ("weights", "optimizer", "copies")]
    for step in (3, 4):  # both have trained at step 2
        shutil.rmtree(joint.folder / "checkpoints" / f"step-{step:06d}")
    assert run(joint, fresh=False) == 0
    for group, end in zip(("weights", "optimizer", "copies"), ends, strict=True):
        again = stored(joint.folder, 4, group)
        assert not differ(end["writer"], again["writer"])
        assert not differ(end["text_to_image"], again["text_to_image"])


def test_the_run_is_exported_sampled_and_its_writer_opened_with_both_trained(joint, tmp_path):
    parts, step = open_policy(joint, RunFolder(joint.folder))
    assert step == 4
    trained = {f"text_to_image/{name}": each for name, each in parts.painted.parameters.items()}
    assert not differ(trained, stored(joint.folder, 4)["text_to_image"])
    assert open_writer(str(joint.folder))("a red circle").text
    export_target(joint.folder, to=tmp_path / "export", which="current")
    assert json.loads((tmp_path / "export" / "text_to_image" / "transformer" / "config.json").read_text())
    written = type(parts.image_model.module).from_pretrained(tmp_path / "export" / "text_to_image" / "transformer")
    assert all(torch.equal(each, trained[f"text_to_image/{name}"]) for name, each in written.named_parameters())
    assert (tmp_path / "export" / "adapter_model.safetensors").is_file()


def test_a_sample_teaches_both_with_the_same_advantage_and_its_image_is_that_of_the_image_models_chain(tmp_path):
    parts = assemble(recipe(tmp_path), Ranks())
    at, phase = parts.phase(0, stepper=parts.stepper(), judge=parts.judge.for_split("train"))
    found = collect(at, phase, 0)
    rewards = found.judged.rewards
    advantages = group_relative(rewards, torch.tensor([0] * 4 + [1] * 4)).float()
    assert rewards[:4].std() > 0
    for each in (found, found.painted):
        assert torch.equal(each.advantages, advantages[:, None].expand(each.trajectory.mask.shape))
    texts = [completion.text for completion in found.trajectory.outputs]
    assert [task.instruction for task in found.painted.batch.tasks] == [text.strip() for text in texts]
    latents = found.painted.trajectory.outputs
    again = at.painting.decode(found.painted.batch.tasks, found.painted.trajectory)
    assert len(latents) == 8
    assert [image.tobytes() for image in again] == [image.tobytes() for image in found.images]


def test_the_text_to_image_is_not_blamed_for_a_completion_without_a_prompt(tmp_path):
    parts = assemble(recipe(tmp_path), Ranks())
    at, phase = parts.phase(0, stepper=parts.stepper(), judge=parts.judge.for_split("train"))
    batch = phase.batch(0).take(slice(0, 3))
    texts = [("a red circle", False), ("?", False), ("a red circle and a", True)]
    outputs = [Completion((1,), text, truncated, (5, 0, 0, row)) for row, (text, truncated) in enumerate(texts)]
    rows, made, images = at.painting.paint(batch, outputs)
    assert [image is None for image in images] == [False, True, True]
    assert made.mask.any(dim=1).tolist() == [True, False, False]
    assert rows.tasks[0].instruction == "a red circle"
    assert rows.group_ids == tuple(batch.group_ids[k] for k in batch.group)


@pytest.mark.parametrize("objective", slow_after(1, [{"kind": "nft"}, {"kind": "awm", "reference_weight": 0.1}]))
def test_a_text_to_image_learns_by_other_objectives_too(tmp_path, objective):
    changes = [
        f"text_to_image.objective={json.dumps(objective)}",
        'text_to_image.rollout={"num_steps":3,"transition":{"kind":"ode"}}',
    ]
    made = recipe(tmp_path, *changes, "steps=2")
    assert run(made, fresh=False) == 0
    (first, second) = (stored(made.folder, step) for step in (1, 2))
    assert differ(first["writer"], second["writer"])
    assert differ(first["text_to_image"], second["text_to_image"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            ['text_to_image.objective={"kind":"dpo"}'],
            "text_to_image.objective.kind: dpo does not learn from the advantages of single samples",
        ),
        (
            ['text_to_image.rollout.transition={"kind":"ode"}'],
            "text_to_image.rollout.transition.kind: ode has no log-probabilities",
        ),
        (
            ['text_to_image.rollout.window={"mode":"branch","size":1}'],
            "text_to_image.rollout.window: the samples of a group have different",
        ),
        (["rollout.staleness=1"], "rollout.staleness: with text_to_image, all samples of a step are made in that step"),
        (['rollout.turns={"most":2}'], "rollout.turns: with text_to_image, all samples of a step are made in that step and once"),
        (["sharding=zero2"], "sharding: zero2 shards only the writer; set sharding to null"),
        (['advantage={"kind":"gae"}'], "advantage.kind: a value head predicts rewards for tokens only"),
        (
            ["text_to_image.objective.clip_high=0.2"],
            "text_to_image.objective.clip_low, text_to_image.objective.clip_high: clip range",
        ),
    ],
)
def test_settings_that_a_text_to_image_cannot_train_with_are_refused(tmp_path, changes, problem):
    with pytest.raises(ValueError, match=problem):
        recipe(tmp_path, *changes)


def test_only_the_image_model_of_a_prompt_renderer_can_be_a_text_to_image(tmp_path):
    section = value_of(json.dumps(load(JOINT).document()["text_to_image"]))
    document = load("recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet").document()
    with pytest.raises(ValueError, match="text_to_image: only the image model of a renderer of kind prompt trains together"):
        parse({**document, "text_to_image": section})


def test_an_editor_learns_with_the_writer_of_its_prompts_on_the_source_images_of_the_tasks(make):
    made = parse(
        make(
            checkpoints={"every": 1, "keep": 2},
            policy__model={"kind": "qwen-vl", "path": make()["policy"]["model"]["path"]},
            renderer={"kind": "prompt", "model": {"kind": "playground"}, "num_steps": 2, "ignore_completions": True},
            text_to_image={
                **{"train": {"kind": "full"}, "objective": {"kind": "nft"}, "learning_rate": 1e-3, "microbatch": 4},
                "rollout": {"num_steps": 2, "transition": {"kind": "ode"}},
            },
        )
    )
    assembly = assemble(made, Ranks())
    first, phase = assembly.phase(0, stepper=assembly.stepper(), judge=lambda batch, samples: assembly.judge.submit(samples))
    painted = collect(first, phase, 0).painted
    tasks = {task.id: task for task in phase.batch(0).tasks}
    assert all(row.images[0].tobytes() == tasks[row.id].images[0].tobytes() for row in painted.batch.tasks)
    assert run(made, fresh=False) == 0
    assert differ(stored(made.folder, 1)["text_to_image"], stored(made.folder, 2)["text_to_image"])
