"""On-policy distillation: losses and gradients against hand-written ones, for chains and tokens; a teacher from another run."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from transformers import Emu3Config, Emu3ForConditionalGeneration

import tiny_emu3
import tiny_models
import tiny_policies as tiny
import tiny_writer_runs as runs
import tiny_writers
import tiny_writing
from retouch.data.base import DataSets
from retouch.distributed.ranks import Ranks
from retouch.models.pipeline import Guided
from retouch.objectives.base import ObjectiveContext
from retouch.objectives.distillation import OPD, Teacher
from retouch.objectives.imitation import CrossEntropy, Supervised
from retouch.protocols import TaughtPolicy
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.renderers.base import CodesDecoder
from retouch.run import checkpoint
from retouch.run.build import assemble, encode_prompts
from retouch.run.session import run
from retouch.types import Batch, Conditioning, Task
from retouch_worlds.playground import playground_weights
from tiny_recipes import SMALL

STEPS = {"one": ["make it blue"], "two": ["make it red", "turn it over"]}
CONTEXT = ObjectiveContext(
    **{"objective": "objective", "rollout": "rollout", "model": "sd3", "is_autoregressive": False, "token_kinds": None},
    **{"stochastic": False, "noise_level": None, "reduction": "mean", "actions": None, "microbatch": 4, "optimizer_steps": 1},
    lora_dropout=None,
)


def tasks(count):
    """The first task has one instruction for the teacher, the second has two; both have a tag."""
    return tuple(
        replace(task, meta={"steps": STEPS[name]}, tags={"kind": name}) for task, name in zip(tiny.tasks(count), STEPS, strict=True)
    )


def slopes(policy, value):
    found = torch.autograd.grad(value, list(tiny.trained(policy).values()), allow_unused=True)
    pairs = zip(tiny.trained(policy).items(), found, strict=True)
    return {name: torch.zeros_like(parameter) if part is None else part for (name, parameter), part in pairs}


def taught_by_hand(policy, batch, trajectory, asked, *, scale=1.0, weights="reference"):
    """For each row, its states, their sigmas, and the velocities of the teacher and of the policy."""
    model = policy.model
    teacher = Guided(model, scale) if scale > 1 else model
    seen, own = teacher.encode(asked), model.encode(batch.tasks)
    for row, group in enumerate(batch.group):
        count = trajectory.mask.shape[1]
        x = trajectory.latents[row, :count]
        sigmas = trajectory.sigmas[trajectory.first : trajectory.first + count + 1]
        several = torch.full((count,), group)
        with torch.no_grad(), policy.copies.using(weights):
            theirs = teacher.velocity(model.module, x, sigmas[:-1], seen.take(several))
        yield x, sigmas, theirs, model.velocity(model.module, x, sigmas[:-1], own.take(several))


@pytest.mark.parametrize("family", ["sd3", "edit"])
def test_deterministic_chains_match_the_velocity_of_a_teacher_that_edits_step_by_step(family):
    """The teacher of the second task sees the image that it made of the first instruction, and the second instruction."""
    objective = OPD(teachers={"single": Teacher(instructions="steps")})
    policy, batch = tiny.policy(family, kind="ode", objective=objective), tiny.batch(tasks=tasks)
    assert isinstance(policy, TaughtPolicy)
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    assert trajectory.latents.shape[1] == tiny.NUM_STEPS + 1
    assert trajectory.log_probs.shape[1] == tiny.NUM_STEPS

    first, second = batch.tasks
    between = Batch(batch.seed, batch.step, (replace(second, instruction="make it red"),), group_ids=(1,), group=(0,), slot=(-1,))
    with policy.copies.using("reference"):
        made = policy.sample(between)
    (image,) = policy.model.decode(made.outputs, made.conditioning)
    asked = [replace(first, instruction="make it blue"), replace(second, instruction="turn it over", images=(image,))]

    found, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, [0.0] * 4))
    rows = taught_by_hand(policy, batch, trajectory, asked)
    total = sum((own - theirs).square().mean() for _, _, theirs, own in rows) / len(batch)
    assert total > 1e-6
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=0)
    assert tiny.distance(found, slopes(policy, total)) < 1e-4


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_stochastic_chains_match_the_gaussian_step_of_a_guided_teacher(kind):
    """The mean of a step is linear in the velocity, so the KL is (coefficient * (v - v_teacher))^2 / (2 std^2)."""
    objective = OPD(teachers={"guided": Teacher(guidance_scale=3.0)})
    policy, batch = tiny.policy(kind=kind, objective=objective), tiny.batch()
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    found, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, [0.0] * 4))
    total, flat = torch.zeros(()), torch.zeros(1, 1)
    for _, sigmas, theirs, own in taught_by_hand(policy, batch, trajectory, batch.tasks, scale=3.0):
        for k in range(len(own)):
            step = policy.sampling.transition.step
            times = {"sigma_max": trajectory.sigmas[1], "reduction": "mean", "next": flat}
            still, moved = (step(flat, flat + v, sigmas[k, None], sigmas[k + 1, None], **times) for v in (0.0, 1.0))
            slope = moved.mean - still.mean
            total = total + (slope * (own[k] - theirs[k])).square().mean() / (2 * moved.step_std.square()).squeeze() / len(own)
    total = total / len(batch)
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=0)
    assert tiny.distance(found, slopes(policy, total)) < 1e-4


@pytest.mark.parametrize(("kl", "larger"), [("forward", False), ("reverse", False), ("forward", True)])
def test_tokens_match_the_kl_to_a_teacher_with_a_better_prompt(kl, larger):
    """A larger teacher reads the images with its own, wider vision tower, and has fewer unused ids."""
    teacher = Teacher(instructions="better", model="larger" if larger else None)
    objective = OPD(teachers={"prompted": teacher}, kl=kl)
    asked = tuple(replace(task, meta={"better": f"{task.instruction} abc"}) for task in tiny_writers.tasks())
    policy, batch = tiny_writing.policy(), tiny_writing.batch(asked)
    tiny.perturb(policy)
    model = policy.model
    if larger:
        wider = {"hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 3}
        model = tiny_writers.writer(seed=4, train="none", text={**wider, "vocab_size": len(tiny_writers.tokenizer()) + 2})
        policy.copies.models[teacher.weights] = model
    trajectory = policy.rollout(batch)
    found, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, [0.0] * len(batch)))
    prompts = model.encode([replace(task, instruction=str(task.meta["better"])) for task in asked])
    total, ids_of_text = torch.zeros(()), policy.model.grammar.vocabularies[0].nonzero()[:, 0]
    for row, group in enumerate(batch.group):
        length, several = int(trajectory.lengths[row]), torch.tensor([group])
        ids, real = trajectory.ids[row : row + 1, :length], torch.ones(1, length, dtype=torch.bool)

        def log_probs(model, inputs, ids=ids, real=real, several=several):
            logits = model.logits(model.module, model.states(model.module, inputs.take(several), ids, real)[0])
            return logits[:, ids_of_text].log_softmax(-1)

        with torch.no_grad(), policy.copies.using("reference"):
            theirs = log_probs(model, prompts)
        first, second = log_probs(policy.model, trajectory.prompts), theirs
        if kl == "forward":
            first, second = second, first
        total = total + (first.exp() * (first - second)).sum(-1).mean() / len(batch)
    assert total > 1e-4
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-3, atol=1e-6)
    assert tiny.distance(found, slopes(policy, total)) < 1e-3
    many = [replace(task, meta={"better": ["a", "b"]}) for task in asked]
    with pytest.raises(ValueError, match=r"several instructions, and the policy makes no image in between; give one text"):
        [*objective.losses(policy, replace(tiny.minibatch(batch, trajectory, [0.0] * len(batch)), batch=tiny_writing.batch(many)))]


def image_tokens():
    """A policy whose completions have room for an image, and a batch with the instructions of ``STEPS``."""
    editor = tiny_emu3.editor()
    longest = len(editor.words.header(*editor.grid)) + editor.grid[0] * (editor.grid[1] + 1) + 3
    texts = enumerate(STEPS.values())
    asked = tuple(Task(f"t{k}", "a", (tiny_models.image(k, 16, 24),), meta={"steps": steps}) for k, steps in texts)
    return tiny_writing.policy(writer=editor, sampling={"max_new_tokens": longest}), tiny_writing.batch(asked)


def test_image_tokens_are_taught_edit_by_edit():
    """The teacher sees the most likely image for the first instruction, and the second instruction; weights are the reference's."""
    policy, batch = image_tokens()
    tiny.perturb(policy)
    editor, (first, second) = policy.model, batch.tasks
    between = tiny_writing.batch((replace(second, instruction="make it red"),), group_size=1)
    with policy.copies.using("reference"):
        (image,) = CodesDecoder(editor)(between.tasks, policy.sample(between))
    assert image is not None
    encode, seen = policy.teacher_inputs, []
    policy.teacher_inputs = lambda asked, **how: seen.append(encode(asked, **how)) or seen[-1]
    objective = OPD(teachers={"single": Teacher(instructions="steps")})
    tiny.gradient(policy, objective, tiny.minibatch(batch, policy.rollout(batch), [0.0] * len(batch)))
    (inputs,) = seen
    wanted = [replace(first, instruction="make it blue"), replace(second, instruction="turn it over", images=(image,))]
    assert torch.equal(inputs.ids, editor.encode(wanted).ids)
    other = editor.encode([wanted[0], replace(wanted[1], images=second.images)])
    assert not torch.equal(inputs.ids, other.ids)


@pytest.mark.parametrize("actions", ["denoising", "tokens"])
def test_the_images_of_a_teacher_are_imitated_and_a_task_without_one_learns_nothing(actions, monkeypatch):
    """The teacher has the reference's weights; of several instructions, it follows each on the image before."""
    if actions == "denoising":
        policy, batch = tiny.policy("edit"), tiny.batch(tasks=tasks)
        objective = Supervised(teacher=Teacher(instructions="steps"))
    else:
        (policy, batch), objective = image_tokens(), CrossEntropy(teacher=Teacher(instructions="steps"))
    tiny.perturb(policy)

    def edit(task, number, text, image, slot):
        rows = Batch(batch.seed, batch.step, (replace(task, instruction=text, images=(image,)),), (number,), (0,), (slot,))
        (made,) = policy.teacher_images(rows, weights="reference", guidance_scale=None)
        return made

    first, second = batch.tasks
    between = edit(second, 1, "make it red", second.images[0], -1)
    last = -1 - 2**16
    wanted = [edit(first, 0, "make it blue", first.images[0], last), edit(second, 1, "turn it over", between, last)]
    taught = tuple(replace(task, target=image) for task, image in zip(batch.tasks, wanted, strict=True))
    by_hand, found = policy.demonstrate(replace(batch, tasks=taught)), objective.demonstrate(policy, batch)
    name = "outputs" if actions == "denoising" else "ids"
    assert torch.equal(getattr(found, name), getattr(by_hand, name))
    assert torch.equal(found.mask, by_hand.mask)
    monkeypatch.setattr(policy, "teacher_images", lambda rows, **how: [None, *wanted[1:]][-len(rows.tasks) :])
    lacking = objective.demonstrate(policy, batch).mask
    assert torch.equal(lacking[len(lacking) // 2 :], by_hand.mask[len(lacking) // 2 :])
    assert not lacking[: len(lacking) // 2].any()
    monkeypatch.setattr(policy, "teacher_images", lambda rows, **how: [None] * len(rows.tasks))
    with pytest.raises(ValueError, match=r"objective.teacher: it made no image of any of the tasks"):
        objective.demonstrate(policy, batch)


def test_data_without_targets_can_be_imitated_with_a_teacher_only():
    policy = {**SMALL["policy"], "model": {"kind": "playground-text-to-image"}}
    data = {"kind": "prompts", "path": "recipes/words.txt", "held_out": 4}
    base = {**SMALL, "policy": policy, "data": data, "reward": {"kind": "share", "combine": {"share": 1}}}
    with pytest.raises(ValueError, match=r"data: .*have no targets, and supervised needs them"):
        parse({**base, "objective": {"kind": "supervised"}})
    made = parse({**base, "objective": {"kind": "supervised", "teacher": {"guidance_scale": 4}}})
    assert made.objective.weight_copies == {"reference"}
    problem = r"objective.teacher: it is the policy before training with the same inputs, so there is nothing to learn; set run"
    with pytest.raises(ValueError, match=problem):
        parse({**base, "objective": {"kind": "supervised", "teacher": {}}})


def test_each_task_learns_from_the_teacher_that_its_tag_names():
    """A batch of two tasks with two teachers has the mean of the losses of each task with its teacher alone."""
    teachers = {"one": Teacher(guidance_scale=3.0), "two": Teacher(instructions="steps")}
    both = OPD(teachers=teachers, by="kind")
    policy, batch = tiny.policy("edit", kind="ode", objective=both), tiny.batch(tasks=tasks)
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    found, _ = tiny.gradient(policy, both, tiny.minibatch(batch, trajectory, [0.0] * 4))
    parts = []
    for (name, teacher), rows in zip(teachers.items(), (slice(0, 2), slice(2, 4)), strict=True):
        alone = OPD(teachers={name: teacher})
        minibatch = tiny.minibatch(batch.take(rows), policy.rollout(batch.take(rows)), [0.0] * 2)
        parts.append(tiny.gradient(policy, alone, minibatch)[0])
    assert tiny.distance(found, {name: (parts[0][name] + parts[1][name]) / 2 for name in found}) < 1e-4
    lost = replace(batch, tasks=(batch.tasks[0], replace(batch.tasks[1], tags={})))
    with pytest.raises(ValueError, match=r"task 't1' has no teacher: it has no tag 'kind'; objective.teachers has one, two"):
        [*both.losses(policy, replace(tiny.minibatch(batch, trajectory, [0.0] * 4), batch=lost))]
    lost = replace(batch, tasks=(batch.tasks[0], replace(batch.tasks[1], meta={"steps": []})))
    with pytest.raises(ValueError, match=r"task 't1': meta\['steps'\]: the teacher's instructions are a text or.*it is \[\]"):
        [*both.losses(policy, replace(tiny.minibatch(batch, trajectory, [0.0] * 4), batch=lost))]


@pytest.mark.parametrize(
    ("objective", "changes", "problem"),
    [
        (OPD(teachers={"a": Teacher()}), {}, "objective.teachers.a: it is the policy before training"),
        (OPD(teachers={"a": Teacher(run="r"), "b": Teacher(run="s")}), {}, "objective.by: there are 2 teachers; name the tag"),
        (
            OPD(teachers={"a": Teacher(run="r", model="m")}),
            {},
            "objective.teachers.a.model: run names other weights of the policy's",
        ),
        (OPD(teachers={"a": Teacher(guidance_scale=2.0)}), {"is_autoregressive": True}, "objective.teachers.a.guidance_scale: tok"),
        (OPD(teachers={"a": Teacher(instructions="x")}), {"sharded": True}, "objective.teachers.a.instructions: with sharding"),
        (OPD(teachers={"a": Teacher(run="r")}), {"engine": True}, "rollout.engine: an engine returns no state"),
    ],
)
def test_settings_that_cannot_teach_are_refused(objective, changes, problem):
    (found,) = objective.problems(replace(CONTEXT, **changes))
    assert found.startswith(problem)
    assert not [*OPD(teachers={"a": Teacher(run="r")}).problems(replace(CONTEXT, sharded=True))]


def taught_by_larger(out, *, config=(), **changed):
    """A recipe whose teacher is the pipeline ``out / "large"``, which this writes: like the built-in one, with twice the blocks of
    the denoiser and the settings ``config``, and without encoders."""
    folder, packaged = out / "large", playground_weights("editor")
    for part in ("vae", "text_encoder"):
        (folder / part).mkdir(parents=True)
        shutil.copy(packaged / part / "config.json", folder / part)
    encoder = json.loads((folder / "text_encoder" / "config.json").read_text())
    encoder["text_config"]["dtype"] = "bfloat16"  # as another version writes it
    (folder / "text_encoder" / "config.json").write_text(json.dumps(encoder))
    torch.manual_seed(5)
    own = QwenImageTransformer2DModel.load_config(packaged / "transformer")
    larger = {**own, "num_layers": 2 * own["num_layers"], **dict(config)}
    QwenImageTransformer2DModel.from_config(larger).save_pretrained(folder / "transformer")
    objective = {"kind": "opd", "teachers": {"large": {"model": str(folder), "guidance_scale": 2.0}}}
    common = {"out": str(out), "device": "cpu", "checkpoints": {"every": 1, "keep": 9}, "eval": {"tasks": 1}, "group_size": 1}
    return parse({**SMALL, **common, "rollout": {"num_steps": 3, "transition": {"kind": "ode"}}, "objective": objective, **changed})


def learns_and_resumes(student, *unneeded, left):
    """Run four steps, after which the loss is below ``left`` times the first one; the fourth, repeated without the folders
    ``unneeded``, gives the same weights. Returns its checkpoint."""
    assert run(student, fresh=False) == 0
    losses = [record["policy/loss"] for record in RunFolder(student.folder).read_metrics()]
    assert losses[-1] < left * losses[0]
    last = student.folder / "checkpoints" / "step-000004"
    whole = {name: tensor.clone() for name, tensor in checkpoint.load(last).tensors["weights"].items()}
    for folder in (last, *unneeded):
        shutil.rmtree(folder)
    assert run(student, fresh=False) == 0
    for name, tensor in checkpoint.load(last).tensors["weights"].items():
        assert torch.equal(tensor, whole[name])
    return last


def test_a_larger_model_teaches_with_its_own_denoiser_and_resumes_to_the_same_bits(tmp_path):
    """The first loss is the mean squared distance of the velocities of two models of different sizes, the larger one guided."""
    student = taught_by_larger(tmp_path, learning_rate=0.02, steps=4)
    parts = assemble(student, Ranks())
    (module,) = (model.module for model in parts.copies.models.values())
    assert len(module.transformer_blocks) == 2 * len(parts.model.module.transformer_blocks)
    loop, phase = parts.phase(0, stepper=parts.stepper(), judge=lambda batch, samples: None)
    batch = phase.batch(0)
    trajectory = loop.policy.rollout(batch)
    (loss, *_) = phase.objective.losses(loop.policy, tiny.minibatch(batch, trajectory, [0.0] * len(batch)))
    model, x, sigmas = Guided(parts.model, 2.0), trajectory.latents[:, :-1], trajectory.sigmas[:-1]
    seen, total = model.encode(batch.tasks), 0.0
    with torch.no_grad():
        for row, group in enumerate(batch.group):
            inputs = torch.full((3,), group)
            theirs = model.velocity(module, x[row], sigmas, seen.take(inputs))
            own = parts.model.velocity(parts.model.module, x[row], sigmas, trajectory.conditioning.take(inputs))
            total += (own - theirs).square().mean().item() / len(batch)
    torch.testing.assert_close(loss.value.item(), total, rtol=1e-4, atol=0)

    shutil.rmtree(learns_and_resumes(student, left=0.9))
    torch.manual_seed(6)
    type(module).from_config(module.config).save_pretrained(tmp_path / "large" / "transformer")
    with pytest.raises(ValueError, match=r"the base weights are not those of the run in .*: teacher-\w+ differs"):
        run(student, fresh=False)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"config": {"patch_size": 4}},
            r"objective.teachers: the transformer of .* has not the inputs and .* model: patch_size is 4 and not 2",
        ),
        ({"vae": "z_dim"}, r"objective.teachers: the vae of .* has not the inputs and outputs of the policy's model: z_dim is 7"),
        ({"transformer": None}, r"objective.teachers: .* is incomplete: transformer has no safetensors file. Download the model"),
    ],
)
def test_a_model_that_cannot_teach_the_policy_is_refused(tmp_path, changed, problem):
    student, folder = taught_by_larger(tmp_path, config=changed.get("config", ())), tmp_path / "large"
    if "vae" in changed:
        config = json.loads((folder / "vae" / "config.json").read_text())
        (folder / "vae" / "config.json").write_text(json.dumps({**config, changed["vae"]: 7}))
    if "transformer" in changed:
        next((folder / "transformer").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=problem):
        assemble(student, Ranks())


def test_a_larger_model_of_image_tokens_teaches_and_resumes_to_the_same_bits(tmp_path):
    """It has the policy's vocabulary and image tokenizer; a model with others is refused before the first step."""
    small, large = tmp_path / "small", tmp_path / "large"
    runs.save_emu3(small)
    whole = Emu3ForConditionalGeneration.from_pretrained(small)
    config = whole.config.to_dict()
    deeper = {**config["text_config"], "num_hidden_layers": 6, "vocab_size": config["text_config"]["vocab_size"] + 8}
    torch.manual_seed(5)
    made = Emu3ForConditionalGeneration(Emu3Config.from_dict({**config, "text_config": deeper}))
    made.save_pretrained(large)
    for file in small.glob("token*"):
        shutil.copy(file, large)
    objective = {"kind": "opd", "teachers": {"large": {"model": str(large)}}}
    changes = {"group_size": 1, "learning_rate": 0.01, "steps": 4, "checkpoints": {"every": 1, "keep": 9}, "objective": objective}
    student = parse(runs.recipe(tmp_path, small, **runs.image_tokens(small), **changes))
    with pytest.raises(
        ValueError, match=r"objective.teachers: .*large has another vocabulary or image tokenizer than the policy's"
    ):
        run(student, fresh=False)
    made.model.vqmodel.load_state_dict(whole.model.vqmodel.state_dict())
    made.save_pretrained(large)
    learns_and_resumes(student, left=0.95)


def test_what_teachers_read_is_encoded_before_the_run():
    """With cached prompt embeddings, the text encoders are gone when the teachers read their prompts."""
    read, model, nothing = [], tiny.MODELS["sd3"](), Conditioning({}, frozenset(), {})
    model.encode = lambda tasks: read.append(tasks[0].instruction) or nothing
    model.encode_negative = lambda tasks: read.append("negative") or nothing
    teachers = {"guided": {"guidance_scale": 3.0}, "single": {"instructions": "steps"}}
    objective = {"kind": "opd", "by": "kind", "teachers": teachers}
    made = parse({**SMALL, "group_size": 1, "rollout": {"num_steps": 3, "transition": {"kind": "ode"}}, "objective": objective})
    asked = [Task("t0", "a and b", meta={"steps": ["a", "b"]}), Task("t1", "c", meta={})]
    (phase,) = made.resolved_phases()
    encode_prompts(made, [(phase, range(2))], [DataSets(train=asked, heldout=[])], Ranks(), model)
    assert sorted(read) == ["a", "a and b", "b", "c", *["negative"] * 4]


def test_a_student_comes_closer_to_a_teacher_from_another_run_and_resumes_to_the_same_bits(tmp_path):
    """One row per task and no advantage. The folder of the teacher is needed only at the start."""
    common = {**SMALL, "out": str(tmp_path), "device": "cpu", "checkpoints": {"every": 1, "keep": 9}, "eval": {"tasks": 1}}
    teacher = parse({**common, "name": "teacher", "steps": 1, "learning_rate": 0.05})
    assert run(teacher, fresh=False) == 0
    learning = {
        "steps": 4,
        "group_size": 1,
        "learning_rate": 0.02,
        "rollout": {"num_steps": 3, "transition": {"kind": "ode"}},
        "objective": {"kind": "opd", "teachers": {"ended": {"run": str(teacher.folder)}}},
    }
    student = parse({**common, **learning, "name": "student"})
    learns_and_resumes(student, teacher.folder, left=0.7)

    again = parse({**common, **learning, "name": "again"})
    with pytest.raises(ValueError, match=r"objective.teachers: .*teacher has no checkpoints; give the folder of a run that"):
        run(again, fresh=False)
    other = parse({**common, "name": "wide", "steps": 1, "policy": {**SMALL["policy"], "train": {"kind": "lora", "rank": 2}}})
    assert run(other, fresh=False) == 0
    learning["objective"] = {"kind": "opd", "teachers": {"wide": {"run": str(other.folder)}}}
    with pytest.raises(ValueError, match=r"wide/checkpoints: its weights are not those that this run trains"):
        run(parse({**common, **learning, "name": "third"}), fresh=False)
