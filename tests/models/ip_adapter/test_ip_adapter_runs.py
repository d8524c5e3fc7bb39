"""IP-Adapters in recipes and whole runs: published values, phases, references, invalid settings and exports."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

import tiny_encoders
import tiny_models
from changed_recipes import differing_paths, values
from rank_commands import on_ranks
from retouch.distributed.ranks import Ranks
from retouch.inference.exporting import export_target, write_export
from retouch.inference.opening import open_recipe, read_target
from retouch.models import ip_adapter
from retouch.models.pretrained import find_encoder
from retouch.policies.denoising import drop_references
from retouch.recipe.document import value_of
from retouch.recipe.recipe import Recipe, check_ranks, load, parse
from retouch.records.files import read_json
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.build import Assembly, assemble
from retouch.run.session import run
from retouch.types import Batch, Conditioning
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models import tiny_fill as flux_parts
from retouch_worlds.pretraining.words import write
from slow_params import slow_except
from tiny_recipes import SMALL

# The full-size recipes of IP-Adapters

FILL = "recipes/flux-fill/ip-adapter-{}.jsonnet"
QWEN = "recipes/qwen-image-edit/ip-adapter-grpo.jsonnet"
GRPO, PPO, NFT = (FILL.format(kind) for kind in ("grpo", "ppo", "nft"))
ALL = (GRPO, PPO, NFT, QWEN)


def twin(name: str) -> str:
    return name.replace(".jsonnet", "-playground.jsonnet")


SOURCES = {
    GRPO: """
        policy.model.kind=flux-fill policy.model.path=black-forest-labs/FLUX.1-Fill-dev policy.model.size=[512,512]
        policy.model.dtype=bfloat16 policy.train.kind=ip-adapter policy.train.encoder=google/siglip-so400m-patch14-384
        policy.train.tokens=128 policy.train.projection=mlp policy.train.blocks=all policy.train.scale=1.0
        policy.train.dropout=0.05 policy.train.lora=null data.kind=triplets data.reference=other data.allow_test_sets=false
        reward.rewards.ocr.kind=ocr reward.rewards.ocr.where=mask reward.rewards.vlm.kind=aspects advantage.kind=group
        objective.kind=policy_gradient objective.kl.kind=velocity objective.kl.weight=0.1 rollout.transition.kind=sde
        rollout.transition.noise_level=0.8 rollout.reduction=mean phases.0.objective.kind=supervised phases.0.steps=400
        phases.1.name=rl phases.1.objective=null ranks=8
    """,
    **{
        name.replace(".jsonnet", "-published.jsonnet"): f"""
            group_size={group_size} learning_rate=1e-5 phases.0.steps={warm_up} rollout.num_steps=20 policy.model.guidance=3.5
            policy.ema.decay={decay} policy.ema.every=1 advantage.clip=5.0
        """
        for name, group_size, warm_up, decay in ((GRPO, 12, 100, 0.9999), (NFT, 4, 1, 0.999))
    },
}
WEIGHTS = {GRPO: (0.5, 0.5)}


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_the_values_of_system_b_or_of_its_scripts(name: str) -> None:
    check_ranks(load(name), 8)
    found = values(load(name).document())
    wanted = {path: value_of(value) for path, _, value in (word.partition("=") for word in SOURCES[name].split())}
    assert {path: found[path] for path in wanted} == wanted
    ocr, vlm = WEIGHTS.get(name, (0.7, 0.3))
    assert found["reward.combine"] == f"{ocr} * ocr/correctness + {vlm} * vlm/quality"
    if name == GRPO:  # the source's clip of 0.2 is for log-probabilities summed over 1024 tokens of 64
        assert found["objective.clip_high"] == pytest.approx(0.2 / (1024 * 64), rel=0.02)


def test_recipes_differ_only_in_the_expected_keys() -> None:
    assert differing_paths(GRPO, PPO) == {"name", "advantage.kind", "advantage.baseline", "advantage.scale"}
    apart = differing_paths(GRPO, NFT)
    for_memory = {"policy.prompt_embeddings", "policy.ema", "policy.ema.decay", "policy.ema.every"}  # NFT has GPUs with more memory
    assert "policy.prompt_embeddings" in apart
    # The microbatch changes time and memory only. NFT does not train three steps of each image, so 3 has no advantage there.
    assert {path.partition(".")[0] for path in apart - for_memory} == {"name", "objective", "rollout", "microbatch"}
    assert load(NFT).objective.kind == "nft"
    assert values(load(NFT).document())["objective.reference_weight"] > 0
    qwen = differing_paths(GRPO, QWEN)
    assert {path.partition(".")[0] for path in qwen} == {"name", "policy", "data", "reward", "rollout", "eval", "microbatch"}
    assert {path for path in qwen if path.startswith("policy.train")} == {"policy.train.blocks"}


def test_published_recipes_keep_the_loss_of_the_full_recipes() -> None:
    grpo, nft = (name.replace(".jsonnet", "-published.jsonnet") for name in (GRPO, NFT))
    for name, published in ((GRPO, grpo), (NFT, nft)):
        changed = {path.partition(".")[0] for path in differing_paths(name, published)}
        sizes = "name data group_size tasks_per_step microbatch phases rollout policy reward objective eval"
        assert changed <= set(sizes.split())
    assert differing_paths(GRPO, grpo).isdisjoint({"objective.kl.weight", "objective.clip_high"})
    # Half of the steps, from the first one on.
    assert load(grpo).rollout.window.actions(num_steps=20, seed=0, step=7) == range(10)
    objective = load(nft).objective
    # The source multiplies its policy loss by the largest advantage.
    assert (objective.beta, objective.reference_weight) == (0.5, pytest.approx(0.01 / objective.advantage_clip))


@pytest.mark.parametrize("name", ALL)
def test_playground_twin_keeps_the_algorithm_settings_of_the_full_recipe(name: str) -> None:
    same = ("policy.kind", "policy.train.kind", "policy.train.projection", "policy.train.blocks", "policy.train.scale")
    same += ("policy.train.dropout", "advantage", "objective", "optimizer", "rollout.transition", "rollout.window")
    same += ("rollout.guidance_scale", "phases.0.objective", "phases.0.name", "phases.1.name", "epochs", "reward.rewards.ocr.kind")
    assert not {path for path in differing_paths(name, twin(name)) if path.startswith(same)} - {"objective.kl.weight"}


@pytest.fixture(scope="module")
def untrained_image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The playground's image model for words, untrained."""
    folder = tmp_path_factory.mktemp("untrained_image_model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write(flux_parts.untrained(flux_parts.autoencoder().eval(), seed=0), folder)
    return folder


@pytest.mark.parametrize("name", slow_except([NFT], ALL))
def test_playground_twin_runs_warm_up_and_rl(name: str, untrained_image_model: Path, tmp_path: Path) -> None:
    small = ["tasks_per_step=2", "group_size=2", "phases.0.steps=1", "phases.0.tasks_per_step=2", "phases.1.steps=1"]
    small.append("rollout.num_steps=6")
    small += ["eval.tasks=2", "eval.num_steps=2", "samples.tasks=2", "eval.every=0", "trackers=[]", f"out={tmp_path}"]
    if name != QWEN:
        small.append(f"policy.model.path={untrained_image_model}")
    recipe = load(twin(name), small)
    assert run(recipe, fresh=False) == 0
    lines = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["warm-up", "rl"]
    assert "reward/ocr/correctness" in lines[1]


def test_rebuilt_playground_encoder_is_the_shipped_one_up_to_rounding(tmp_path: Path) -> None:
    """Embeddings of width 64, for images of 32 x 32 pixels."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "projection_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=32, patch_size=4, **sizes))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.1)
    model.save_pretrained(tmp_path)
    CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False).save_pretrained(tmp_path)
    shipped = find_encoder("playground")
    assert shipped is not None
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (shipped / "preprocessor_config.json").read_bytes()
    assert_close(load_file(tmp_path / "model.safetensors"), load_file(shipped / "model.safetensors"))
    made, kept = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, shipped))
    assert made | {"transformers_version": kept["transformers_version"]} == kept


# IP-Adapters in whole runs of the playground's editor

RL = {"kind": "policy_gradient", "clip_low": 1e-4, "clip_high": 1e-4, "kl": {"kind": "velocity", "weight": 0.1}}

LORA = {"kind": "lora", "rank": 2, "alpha": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny encoders, and edits of the playground with a reference each."""
    root = tiny_encoders.write(tmp_path_factory.mktemp("world"))
    photos = root / "photos"
    photos.mkdir()
    lines = []
    for number, task in enumerate(PlaygroundData(seed=0, count=6, complexity=[1]).tasks(in_turn=True)):
        assert task.target is not None
        names = {part: f"{number}-{part}.png" for part in ("image", "target", "reference")}
        task.images[0].save(photos / names["image"])
        task.target.save(photos / names["target"])
        tiny_models.image(number, 20, 30).save(photos / names["reference"])
        lines.append({"file_name": names.pop("image"), "instruction": task.instruction, **names})
    (photos / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def recipe(world: Path, **changes: Any) -> Recipe:
    """Two steps of warm-up, then two of RL."""
    adapter = {"kind": "ip-adapter", "encoder": str(world / "clip"), "tokens": 4, "projection": "mlp", "dropout": 0.5}
    phases = [{"name": "warm-up", "steps": 2, "objective": {"kind": "supervised"}}, {"name": "rl", "steps": 2}]
    document = deepcopy(SMALL) | {"steps": None, "phases": phases, "objective": RL, "trackers": []}
    document["policy"] |= {"train": adapter | changes.pop("train", {})}
    document["data"] = {"kind": "folder", "path": str(world / "photos"), "held_out": 2}
    document["reward"] = {"kind": "compressibility", "combine": {"compressibility": 1}}
    return parse(document | changes)


SHORT = [{"name": "warm-up", "steps": 1, "objective": {"kind": "supervised"}}, {"name": "rl", "steps": 0}]


def adapter_of(parts: Assembly) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in parts.copies.parameters.items()}


@pytest.mark.slow
def test_warm_up_and_rl_run_resumes_bitwise_and_its_adapter_is_exported(world: Path, tmp_path: Path) -> None:
    whole = recipe(world, out=str(tmp_path / "whole"), checkpoints={"every": 1, "keep": 9})
    assert run(whole, fresh=False) == 0
    saved = sorted((whole.folder / "checkpoints").glob("step-*"))
    steps = {checkpoint.load(folder).step: checkpoint.load(folder).tensors for folder in saved}
    # During warm-up the KL's reference is the initial weights; during RL it is the weights after the warm-up.
    reference = {step: _copy(tensors["copies"], "reference") for step, tensors in steps.items()}
    assert _equal(reference[1], reference[2])
    assert _equal(reference[3], steps[2]["weights"])
    assert _equal(reference[4], steps[2]["weights"])
    assert not _equal(reference[1], reference[3])
    checks = {check["name"]: check for check in read_json(whole.folder / "preflight.json")}
    assert all(check["ok"] for check in checks.values())

    again = recipe(world, out=str(tmp_path / "again"), checkpoints={"every": 1, "keep": 9})
    for stop in (1, 3):
        _run_until_killed(again, stop)
    assert run(again, fresh=False) == 0
    newest = checkpoint.latest(again.folder / "checkpoints")
    assert newest is not None
    for kind in ("weights", "copies", "optimizer"):
        assert _equal(steps[4][kind], checkpoint.load(newest).tensors[kind])

    written = export_target(str(whole.folder), to=tmp_path / "out", which="current")
    names = {"ip_adapter.safetensors", "ip_adapter.json", "export.json", "README.md", "before-and-after.png"}
    assert {path.name for path in written} == names
    assert read_json(tmp_path / "out" / "ip_adapter.json")["tokens"] == 4
    trained, _ = open_recipe(*read_target(str(whole.folder)), trained=True)
    warm = recipe(world, train={"init_from": str(tmp_path / "out")}, name="warm")
    assert _equal(adapter_of(assemble(warm, Ranks())), adapter_of(trained))


def _run_until_killed(recipe: Recipe, stop: int) -> None:
    """Run in this process until step ``stop`` is saved, and then be killed."""

    class Killed(BaseException):
        pass

    save = checkpoint.save

    def saving(folder: Path, state: checkpoint.TrainState, **options: Any) -> None:
        save(folder, state, **options)
        if state.step == stop:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", saving)
        with pytest.raises(Killed):
            run(recipe, fresh=False)


def _copy(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_lora_next_to_the_adapter_is_trained_and_exported(world: Path, tmp_path: Path) -> None:
    both = recipe(world, train={"lora": {"kind": "lora", "rank": 2, "alpha": 4}}, out=str(tmp_path), phases=SHORT)
    parts = assemble(both, Ranks())
    names = set(parts.copies.parameters)
    adapters = {name for name in names if "_ip." in name or "encoder_hid_proj" in name}
    assert {name for name in names if "lora_" in name} == names - adapters
    assert adapters
    assert len(adapters) == sum(1 for part in ip_adapter.modules(parts.model.module) for _ in part.parameters())
    assert run(both, fresh=False) == 0
    written = {path.name for path in export_target(str(both.folder), to=tmp_path / "out")}
    assert written >= {ip_adapter.FILE, "pytorch_lora_weights.safetensors", "adapter_model.safetensors"}


def test_reference_dropout_applies_to_demonstrations_and_not_to_rollouts(world: Path) -> None:
    parts = assemble(recipe(world, train={"dropout": 1.0}), Ranks())
    policy = parts.policy(parts.recipe.rollout)
    tasks = tuple(parts.sets[0].train[index] for index in range(2))
    batch = Batch(seed=0, step=0, tasks=tasks, group_ids=(0, 1), group=(0, 0, 1), slot=(0, 1, 0))
    shown = policy.rollout(batch).conditioning.tensors[Conditioning.REFERENCE]
    hidden = policy.demonstrate(batch).conditioning.tensors[Conditioning.REFERENCE]
    assert (shown.abs().sum(1) > 0).all()
    assert not hidden.any()


def test_reference_dropout_has_its_rate_and_does_not_depend_on_other_groups() -> None:
    count = 2000
    batch = Batch(seed=1, step=2, tasks=(), group_ids=tuple(range(count)), group=(), slot=())
    told = Conditioning({"embeds": torch.ones(count, 3), Conditioning.REFERENCE: torch.randn(count, 4).abs() + 1})
    left = drop_references(told, batch, fraction=0.2).tensors[Conditioning.REFERENCE]
    rows = (left != 0).any(1)
    assert torch.equal(left[rows], told.tensors[Conditioning.REFERENCE][rows])
    assert abs(rows.float().mean() - 0.8) < 4 * (0.16 / count) ** 0.5
    half = Batch(seed=1, step=2, tasks=(), group_ids=tuple(range(1000, count)), group=(), slot=())
    assert torch.equal(
        drop_references(told.take(slice(1000, count)), half, fraction=0.2).tensors[Conditioning.REFERENCE], left[1000:]
    )
    assert drop_references(told, batch, fraction=0.0) is told


def test_reference_policy_uses_the_initial_adapter(world: Path) -> None:
    parts = assemble(recipe(world, train={"dropout": 0.0}), Ranks())
    task = parts.sets[0].train[0]
    policy = parts.policy(parts.recipe.rollout)
    batch = Batch(seed=0, step=0, tasks=(task,), group_ids=(0,), group=(0,), slot=(0,))
    trajectory = policy.demonstrate(batch)
    x, sigma = trajectory.outputs, torch.tensor([0.5])
    start = policy.velocity(trajectory, slice(0, 1), x, sigma, "current")
    with torch.no_grad():
        for part in ip_adapter.modules(parts.model.module)[1:]:
            for parameter in part.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    moved = policy.velocity(trajectory, slice(0, 1), x, sigma, "current")
    reference = policy.velocity(trajectory, slice(0, 1), x, sigma, "reference")
    assert torch.equal(reference, start)
    assert (moved - start).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"kind": "playground", "complexity": [1], "count": 4}}, r"data.kind: playground have no reference image"),
        ({"train": {"blocks": "all"}}, r"policy.train.blocks: Qwen-Image has only double blocks"),
        ({"phases": None, "steps": 2}, r"policy.train.dropout: it applies to supervised phases only, and there is none"),
        ({"train": {"scale": 0}}, r"policy.train.scale"),
        ({"train": {"lora": {"kind": "lora", "rank": 2, "alpha": 4, "dropout": 0.1}}}, r"policy.train.lora.dropout: 0.1 makes"),
        (
            {"data": {"kind": "hub", "path": "a/b", "columns": {"instruction": "x", "image": "y"}}},
            r"data.columns: an IP-Adapter needs a reference image",
        ),
    ],
)
def test_invalid_settings_raise_when_the_recipe_is_parsed(world: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(world, **changes)


def test_row_without_a_reference_raises_with_its_line(world: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (world / "photos" / "metadata.jsonl").read_text().splitlines()]
    for line in lines:
        for part in ("file_name", "target"):
            (tmp_path / line[part]).write_bytes((world / "photos" / line[part]).read_bytes())
        del line["reference"]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"metadata.jsonl:1: error: an IP-Adapter reads a reference image, and this row"):
        assemble(recipe(world, data={"kind": "folder", "path": str(tmp_path), "held_out": 2}), Ranks())


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"projection": "mlp"}, {"projection": "linear", "lora": LORA}], ids=["mlp", "linear-lora"])
def test_training_on_two_fsdp2_ranks_matches_one_rank(world: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    """Each rank has the whole projection; the attention of the blocks is sharded."""
    # With a smaller eps, AdamW would take a full-size step where a gradient consists of rounding errors only.
    reward = {"kind": "import", "class": "tiny_recipes:RedInCentre", "combine": {"red": 1}}
    settings = {"optimizer": {"eps": 1e-4}, "train": form, "reward": reward, "out": str(tmp_path)}
    alone = recipe(world, name="alone", **settings)
    assert run(alone, fresh=False) == 0
    file = tmp_path / "shared.json"
    file.write_text(json.dumps(recipe(world, name="shared", sharding="fsdp2", **settings).document()))
    on_ranks(2, ["-m", "retouch.cli", "train", str(file)], tmp_path / "logs")
    wanted, found = (RunFolder(tmp_path / name).read_metrics() for name in ("alone", "shared"))
    assert len(wanted) == len(found) == 4
    for one, other in zip(wanted, found, strict=True):
        assert one["policy/grad_norm"] > 1e-3
        for name in ("policy/loss", "policy/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
    files = [export_target(str(tmp_path / name), to=tmp_path / f"{name}-weights") for name in ("alone", "shared")]
    weights, shared, start = (
        {f"{file.stem}/{key}": tensor for file in some if file.suffix == ".safetensors" for key, tensor in load_file(file).items()}
        for some in (*files, write_export(assemble(alone, Ranks()), tmp_path / "start", step=0))
    )
    assert weights.keys() == shared.keys() == start.keys()
    assert max(float((weights[name] - shared[name]).abs().max()) for name in weights) <= 1e-6
    moved = {name: float((weights[name] - start[name]).abs().max()) for name in weights if name.startswith("ip_adapter")}
    assert len(moved) > 8
    assert min(moved.values()) > 1e-5
