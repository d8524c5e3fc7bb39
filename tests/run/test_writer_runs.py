"""Complete runs of writers with an editing model or a text-to-image model as the renderer, on one rank and on two."""

import json

import pytest
import torch

import tiny_writer_runs
from retouch import cli
from retouch.distributed.ranks import Ranks
from retouch.inference.opening import evaluate_target
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.build import assemble
from retouch.run.session import run
from retouch_worlds.data import PlaygroundData


@pytest.fixture(scope="module")
def trained(tmp_path_factory, writer):
    recipe = parse(tiny_writer_runs.recipe(tmp_path_factory.mktemp("runs"), writer))
    assert run(recipe, fresh=False) == 0
    return RunFolder(recipe.folder)


def test_preflight_metrics_samples_and_report_of_a_writer_are_those_of_completions(trained):
    checks = {check["name"]: check for check in trained.read_preflight()}
    assert all(check["ok"] for check in checks.values())
    assert checks["ratio_before"]["limit"] == 1e-5
    assert checks["kl_gradient"]["value"] > 0

    for line in trained.read_metrics():
        assert 1 <= line["completion/length"] <= 5
        assert 0 <= line["completion/cut_off_fraction"] <= 1
        assert 0 < line["policy/entropy"] < 7
        assert line["policy/ratio_max_first"] <= 1e-5

    for step in (0, 1, 2):
        lines = trained.read_samples(step)
        assert lines
        assert all(isinstance(line["text"], str) for line in lines)
    page = trained.report.read_text(encoding="utf-8")
    assert page.count('class="written"') >= 4


def test_evaluation_and_sampling_are_reproducible(trained, tmp_path, capsys):
    judged = evaluate_target(str(trained.root), [])
    assert judged["step"] == 2
    table = trained.read_evals()[-1]["table"]
    assert json.loads(json.dumps(judged["table"])) == json.loads(json.dumps(table))
    task = PlaygroundData(seed=3, count=1, complexity=[1], split="test").tasks(in_turn=True)[0]
    task.images[0].save(tmp_path / "in.png")
    arguments = ["--instruction", task.instruction, "--image", str(tmp_path / "in.png"), "--out", str(tmp_path / "out.png")]
    assert cli.main(["sample", str(trained.root), *arguments]) == 0
    assert (tmp_path / "out.png").is_file()
    first = capsys.readouterr().out
    assert cli.main(["sample", str(trained.root), *arguments]) == 0
    assert capsys.readouterr().out == first != "\n"


def test_renderer_with_encoder_policy_shares_the_trained_weights(make):
    parts = assemble(parse(make(renderer__encoder="policy", renderer__guidance_scale=2.0)), Ranks())
    assert "reference" in parts.copies.copies
    parts.renderer()
    assert parts.image_model.text.encoder is parts.model.module
    run_, phase = parts.phase(0, stepper=parts.stepper(), judge=parts.judge)
    batch = phase.batch(0).take(slice(0, 2))
    trajectory, tasks = run_.policy.rollout(batch), [batch.tasks[k] for k in batch.group]
    before = [image.tobytes() for image in run_.renderer(tasks, trajectory) if image is not None]
    move(parts)
    after = [image.tobytes() for image in run_.renderer(tasks, trajectory) if image is not None]
    assert len(before) == len(after) == 2
    assert before != after


@torch.no_grad()
def move(parts):
    """Change all trained weights."""
    for parameter in parts.copies.parameters.values():
        parameter.add_(0.3)


def test_users_renderer_encodes_with_averaged_weights_and_renderer_with_current_ones(make):
    parts = assemble(parse(make(renderer__encoder="policy", policy__ema={"decay": 0.9})), Ranks())
    batch = parts.phase(0, stepper=parts.stepper(), judge=parts.judge)[1].batch(0).take(slice(0, 1))
    acted, tasks = parts.policy(parts.recipe.rollout).sample(batch), [batch.tasks[0]]
    renderers = (parts.users_renderer(), parts.renderer())
    shown = [renderer(tasks, acted)[0] for renderer in renderers]
    move(parts)
    moved = [renderer(tasks, acted)[0] for renderer in renderers]
    assert None not in (*shown, *moved)
    assert [before.tobytes() == after.tobytes() for before, after in zip(shown, moved, strict=True)] == [True, False]


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_prompt_writer_trains_with_a_text_to_image_renderer(make, tmp_path, guidance_scale):
    tiny_writer_runs.save_language_model(tmp_path / "speaker")
    (tmp_path / "prompts.txt").write_text("\n".join(f"a red cat number {k}" for k in range(8)))
    document = make(
        steps=1,
        policy__model={"kind": "qwen", "path": str(tmp_path / "speaker"), "dtype": "float32", "system": "Write a prompt."},
        renderer={
            **{"kind": "prompt", "model": {"kind": "import", "class": "tiny_writer_runs:TinySD3"}, "num_steps": 2},
            **{"cut_off": "draw", "guidance_scale": guidance_scale},
        },
        data={"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "held_out": 2},
        reward={"kind": "share", "combine": {"share": 1}, "max_missing": 0.9},
        eval={"tasks": 2},
    )
    assert run(parse(document), fresh=False) == 0
    folder = RunFolder(tmp_path / "written")
    (line,) = folder.read_metrics()
    assert line["reward/std"] > 0
    assert any(sample["image"] is not None for sample in folder.read_samples(1))


def test_sft_learns_the_completions_of_the_data(make, tmp_path, writer):
    tasks = PlaygroundData(seed=0, count=8, complexity=[1]).tasks(in_turn=True)
    (tmp_path / "photos").mkdir()
    lines = []
    for number, task in enumerate(tasks):
        task.images[0].save(tmp_path / "photos" / f"{number}.png")
        row = {"file_name": f"{number}.png", "instruction": task.instruction, "completion": "make it red"}
        lines.append(json.dumps(row))
    (tmp_path / "photos" / "metadata.jsonl").write_text("\n".join(lines))
    document = make(
        steps=24, group_size=1, learning_rate=0.01, policy__train={"kind": "full"}, policy__entropy=False,
        rollout__max_new_tokens=12, objective={"kind": "sft"},
        data={"kind": "folder", "path": str(tmp_path / "photos"), "held_out": 2},
        reward={"kind": "share", "combine": {"share": 1}},
        samples={"every": 0, "tasks": 2},
    )  # fmt: skip
    assert run(parse(document), fresh=False) == 0
    folder = RunFolder(tmp_path / "written")
    losses = [line["policy/loss"] for line in folder.read_metrics()]
    assert losses[-1] < 0.2 * losses[0]
    assert all(line["text"].startswith("make it red") for line in folder.read_samples(24))


def test_writer_whose_tokenizer_differs_from_the_editor_raises(make, tmp_path):
    tiny_writer_runs.save_writer(tmp_path / "other")
    words = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="its tokenizer differs from the editor"):
        assemble(parse(make(policy__model__path=str(tmp_path / "other"))), Ranks())
