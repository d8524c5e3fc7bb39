"""The full-size recipes: the values of the systems that they reproduce, their differences, and those for photographs."""

import json

import pytest
from PIL import Image

from changed_recipes import differing_paths, values
from retouch.config.packaged import available, find, shipped, short_name
from retouch.data.sources.folder import read_prompts
from retouch.recipe.document import evaluate, value_of
from retouch.recipe.recipe import check_ranks, load
from retouch.run.build import build_sets

EDITOR = "recipes/qwen-image-edit/"
ENHANCER = "recipes/sd3/prompt-enhancer.jsonnet"
TEXT_TO_IMAGE = "recipes/qwen-image/writer-grpo-published.jsonnet"
CURRICULUM = "recipes/qwen-image/writer-grpo-published-mmmg.jsonnet"
PUBLISHED_ENHANCER = "recipes/sd3/prompt-enhancer-published.jsonnet"
OCR = "recipes/sd3/ocr-grpo.jsonnet"
FLOW_GRPO = f"{EDITOR}flow-grpo.jsonnet"
WRITERS = [f"{EDITOR}writer-grpo.jsonnet", f"{EDITOR}writer-grpo-frozen.jsonnet", f"{EDITOR}writer-grpo-identity.jsonnet"]


PUBLISHED_LORA, PUBLISHED_FULL = (f"{EDITOR}writer-grpo-{name}.jsonnet" for name in ("2509-published", "full-2509-published"))
SHARED = """
    policy.model.path=Qwen/Qwen2.5-VL-7B-Instruct renderer.model.kind=qwen-image-edit-plus
    renderer.model.path=Qwen/Qwen-Image-Edit-2509 renderer.num_steps=50 renderer.guidance_scale=4.0 rollout.max_new_tokens=1024
    group_size=16 tasks_per_step=1 steps=1000 objective.normalise=dr_grpo checkpoints.every=50 checkpoints.keep=10
    reward.combine.alignment=0.6 reward.combine.quality=0.4 reward.n_evals=3
"""
SOURCES: dict[str, str] = {
    WRITERS[0]: """
        policy.model.kind=qwen-vl policy.model.path=Qwen/Qwen2.5-VL-7B-Instruct policy.model.dtype=bfloat16 policy.train.rank=32
        policy.train.alpha=64.0 policy.train.targets=null renderer.kind=response renderer.model.kind=qwen-image-edit
        renderer.model.path=Qwen/Qwen-Image-Edit renderer.model.dtype=bfloat16 renderer.encoder=policy renderer.shared_noise=true
        data.kind=complex-edit data.split=test_real data.complexity="8" data.allow_test_sets=false group_size=8 tasks_per_step=2
        microbatch=1 ranks=8 sharding=zero2 learning_rate=1e-5 passes=3.0 steps=null checkpoints.every=500 reward.kind=aspects
        reward.n_evals=3 reward.combine.alignment=0.6 reward.combine.quality=0.4 reward.combine.identity=0.0
        reward.judge.key=OPENAI_API_KEY
    """,
    PUBLISHED_LORA: SHARED + 'policy.train.rank=128 policy.train.alpha=256.0 learning_rate=1e-5 data.complexity="8"',
    PUBLISHED_FULL: SHARED + 'policy.train.kind=full policy.gradient_checkpointing=true learning_rate=5e-6 data.complexity="1-8"',
    TEXT_TO_IMAGE: """
        renderer.kind=response renderer.model.kind=qwen-image renderer.num_steps=8 group_size=16 tasks_per_step=8 steps=500
        learning_rate=1e-5 policy.train.rank=128 policy.train.alpha=256.0 objective.normalise=token objective.clip_low=0.2
        objective.clip_high=0.28 reward.combine.alignment=0.5 reward.combine.quality=0.5
    """,
    ENHANCER: """
        policy.model.kind=qwen-vl policy.model.path=Qwen/Qwen2-VL-7B-Instruct rollout.max_new_tokens=100 rollout.temperature=0.7
        renderer.kind=prompt renderer.model.kind=sd3 renderer.model.path=stabilityai/stable-diffusion-3-medium-diffusers
        data.kind=prompts data.path=recipes/sd3/challenging.txt reward.rewards.clip.path=openai/clip-vit-base-patch32
        reward.rewards.quality.kind=prompt_quality devices.policy=cuda:0 devices.renderer=cuda:1 devices.reward=cuda:2
        devices.memory_fraction=null devices.empty_cache_every=null reward.combine.clip/similarity=1.0
    """,
    PUBLISHED_ENHANCER: """
        learning_rate=1e-5 steps=50 epochs=3 tasks_per_step=2 objective.clip_low=0.2 objective.clip_high=0.2 objective.kl.kind=k3
        objective.kl.weight=0.05 objective.entropy_bonus=0.02 renderer.num_steps=28 renderer.guidance_scale=7.0
    """,
    FLOW_GRPO: """
        policy.train.rank=64 policy.train.alpha=128.0 group_size=16 tasks_per_step=32
    """,
    OCR: """
        policy.model.kind=sd3 policy.model.path=stabilityai/stable-diffusion-3.5-medium policy.model.size=[512,512]
        policy.train.rank=32 policy.train.alpha=64.0 policy.ema.decay=0.9 policy.ema.every=8 rollout.num_steps=10
        rollout.window.mode=all rollout.transition.kind=sde rollout.transition.noise_level=0.7 rollout.guidance_scale=4.5
        rollout.reduction=mean rollout.shared_noise=false eval.num_steps=40 eval.every=20 checkpoints.every=20 tasks_per_step=48
        group_size=24 microbatch=9 minibatches=2 ranks=32 epochs=1 learning_rate=3e-4 optimizer.weight_decay=1e-4
        optimizer.betas=[0.9,0.999] optimizer.eps=1e-8 optimizer.max_grad_norm=1.0 objective.surrogate=clip objective.clip_low=1e-4
        objective.clip_high=1e-4 objective.kl.kind=closed objective.kl.weight=0.04 advantage.kind=group advantage.scale=batch
        advantage.clip=5.0 data.kind=prompts reward.kind=ocr reward.where=picture reward.combine.correctness=1.0
    """,
}
"""The values of the systems that the recipes reproduce, as in ``--set``."""


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_the_values_of_its_source(name):
    found = values(load(name).document())
    wanted = {path: value_of(value) for path, _, value in (word.partition("=") for word in SOURCES[name].split())}
    assert {path: found[path] for path in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, (8,)) for name in (WRITERS[0], PUBLISHED_LORA, PUBLISHED_FULL, TEXT_TO_IMAGE, FLOW_GRPO)), (OCR, (8, 16, 24, 32))],
)
def test_the_rows_of_a_recipe_divide_over_the_ranks_of_its_source(name, ranks):
    for number in ranks:
        check_ranks(load(name), number)


def test_the_curriculum_recipe_trains_100_steps_on_each_of_five_stages():
    """The source divides its 500 steps evenly among 5 difficulties, and never starts the optimizer anew."""
    recipe = load(CURRICULUM)
    check_ranks(recipe, 8)
    phases = recipe.resolved_phases()
    assert [(phase.steps, phase.keep_optimizer) for phase in phases] == [(100, False), *[(100, True)] * 4]
    assert [phase.data.paths() for phase in phases] == [[f"lists/stage-{number}.jsonl"] for number in range(1, 6)]
    assert recipe.reward.combine == "0.5 * mmmg/fidelity + 0.5 * looks/quality"


@pytest.mark.parametrize(
    ("one", "other", "changed"),
    [
        (WRITERS[0], WRITERS[1], "name renderer.encoder"),
        (WRITERS[0], f"{EDITOR}writer-grpo-published.jsonnet", "name objective.normalise optimizer.schedule"),
        (WRITERS[1], WRITERS[2], "name reward.combine reward.combine.alignment reward.combine.quality reward.combine.identity"),
        (TEXT_TO_IMAGE, CURRICULUM, "name steps data reward phases"),
        (
            ENHANCER,
            PUBLISHED_ENHANCER,
            "name steps epochs tasks_per_step eval.every samples.every checkpoints.every objective.kl.kind objective.kl.weight "
            "objective.entropy_bonus",
        ),
    ],
)
def test_variants_of_a_recipe_differ_only_in_what_they_are_about(one, other, changed):
    parts = 1 if other == CURRICULUM else None
    assert {".".join(path.split(".")[:parts]) for path in differing_paths(one, other)} == set(changed.split())


def test_lora_targets_of_writer_recipes_are_the_four_attention_projections():
    for name in (*WRITERS, ENHANCER):
        policy = load(name).policy
        targets = policy.train.lora.layers(policy.model.lora_targets)
        assert sorted(target.rpartition(".")[2] for target in targets) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_the_published_enhancer_recipe_accepts_the_bound_on_prompt_drift():
    """With the two changes that its header comment describes."""
    bound = "reward.combine=clip/similarity - max(0.7 - sentence/kept, 0)"
    recipe = load(PUBLISHED_ENHANCER, ["reward.rewards.sentence.kind=sentence_similarity", bound])
    said = find(PUBLISHED_ENHANCER).read_text(encoding="utf-8")
    assert "--set reward.rewards.sentence.kind=sentence_similarity" in said
    assert bound.partition("=")[2] in said
    assert values(recipe.document())["reward.combine"] == bound.partition("=")[2]


def test_prompts_without_quoted_text_raise_with_their_line(tmp_path):
    prompts = tmp_path / "words.txt"
    prompts.write_text('A sign that says "Open 24" and "more"\nA cat.\nA door with "Push" on it\n')
    recipe = load(OCR, [f"data.path={prompts}", "data.held_out=1"])
    with pytest.raises(ValueError, match=r"words\.txt:2: error: no text for the reward to look for"):
        build_sets(recipe, recipe.data, size=(512, 512))
    prompts.write_text('A sign that says "Open 24" and "more"\nA door with "Push" on it\n')
    sets = build_sets(recipe, recipe.data, size=(512, 512))
    assert sorted(task.text for part in (sets.train, sets.heldout) for task in (part[0],)) == ["Open 24", "Push"]


def test_packaged_prompts_are_read_from_any_working_directory_unless_there_is_a_local_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = read_prompts(shipped(load(ENHANCER).data.path))
    prompts = [rows[index].instruction for index in range(len(rows))]
    assert not rows.problems
    assert len(set(prompts)) == len(prompts) == 120
    named = ["purple rabbit", "green cat with blue eyes", "square wheel", "concept of happiness", "transparent glass butterfly"]
    assert all(any(words in prompt for prompt in prompts) for words in named)
    own = tmp_path / "recipes" / "sd3" / "challenging.txt"
    own.parent.mkdir(parents=True)
    own.write_text("a cat\n")
    assert shipped("recipes/sd3/challenging.txt").resolve() == own
    assert str(shipped("recipes/sd3/nothing.txt")) == "recipes/sd3/nothing.txt"


@pytest.mark.parametrize(
    ("full", "twin"),
    [
        (WRITERS[0], f"{EDITOR}writer-grpo-playground.jsonnet"), (WRITERS[1], f"{EDITOR}writer-grpo-frozen-playground.jsonnet"),
        (ENHANCER, "recipes/sd3/prompt-enhancer-playground.jsonnet"), (OCR, "recipes/sd3/ocr-grpo-playground.jsonnet"),
        ("recipes/sd3/one-gpu.jsonnet", "recipes/sd3/one-gpu-playground.jsonnet"),
        (f"{EDITOR}one-gpu.jsonnet", f"{EDITOR}one-gpu-playground.jsonnet"),
    ],
)  # fmt: skip
def test_a_twin_has_the_training_settings_of_its_full_size_recipe(full, twin):
    same = {"policy.kind", "policy.train", "policy.entropy", "policy.mask_truncated", "rollout.kind", "rollout.top", "epochs"}
    same |= {
        "renderer.kind", "renderer.encoder", "renderer.shared_noise", "renderer.cut_off", "advantage", "objective", "optimizer",
    }  # fmt: skip
    assert not {path for path in differing_paths(full, twin) if path.startswith(tuple(same)) and path != "renderer.encoder_batch"}


TOY_REWARDS = {"photos", "grade", "share"}
SMALL = ("-playground", "tiny", "playground/", "quickstart", "photos")
"""Parts of the names of recipes for tiny models."""


def rewards_of(document):
    """The kinds of the rewards in a recipe's document, also of those inside a ``several``."""
    inner = (document.get("rewards") or {}).values()
    return {document["kind"], *(kind for each in inner for kind in rewards_of(each))}


def test_fault_14_no_full_size_recipe_has_a_reward_that_needs_no_model(monkeypatch):
    for name in ("APP__DATA_DIR", "APP__BASE_EXP_DIR", "APP__REWARD_FUNCTION_API_BASE", "APP__RUN_NAME"):
        monkeypatch.setenv(name, "x")
    documents = {short_name(name): evaluate(find(name)) for name in available()}
    full = {name: read for name, read in documents.items() if name == "flux-kontext/photos" or not any(p in name for p in SMALL)}
    assert len(full) > 20
    found = {name: rewards_of(read["reward"]) & TOY_REWARDS for name, read in full.items() if read.get("reward")}
    assert {name: kinds for name, kinds in found.items() if kinds} == {}
    photos = load("flux-kontext/photos")
    assert photos.ranks in (None, 1)
    assert rewards_of(photos.document()["reward"]) == {"several", "pickscore", "dino"}
    assert photos.document()["policy"]["model"]["path"] == "black-forest-labs/FLUX.1-Kontext-dev"


def test_fault_14_three_of_ten_photographs_are_held_out(tmp_path):
    for index in range(10):
        Image.new("RGB", (60, 50), (20 * index, 90, 60)).save(tmp_path / f"{index}.png")
    rows = [{"file_name": f"{index}.png", "instruction": "warmer"} for index in range(10)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = load("recipes/photos.jsonnet", [f"data.path={tmp_path}"])
    sets = build_sets(recipe, recipe.data, size=recipe.image_size)
    sources = [{task.images[0].getpixel((0, 0)) for task in tasks} for tasks in (sets.train, sets.heldout)]
    assert [len(found) for found in sources] == [7, 3]
    assert not sources[0] & sources[1]
