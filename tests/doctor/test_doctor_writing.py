"""The doctor's memory plans of runs with a writer: the devices of the full-size recipes, whether they fit, and suggestions if
not."""

from collections.abc import Sequence

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from retouch import cli
from retouch.assembly.phases import copies_needed
from retouch.doctor.checks import check_data, check_engines
from retouch.doctor.device import GPUS, PlannedDevice
from retouch.doctor.findings import Finding
from retouch.doctor.writer_memory import check_writer_memory
from retouch.models.playground.family import playground_weights
from retouch.models.playground.language import PlaygroundEmu3
from retouch.recipe.recipe import load

A = "recipes/qwen-image-edit/writer-grpo.jsonnet"
FROZEN = "recipes/qwen-image-edit/writer-grpo-frozen.jsonnet"
C = "recipes/sd3/prompt-enhancer.jsonnet"
D = "recipes/emu3/sft_s__rl_s.jsonnet"


@pytest.fixture(autouse=True)
def no_weights(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))


def check(name: str, card: str, *changes: str) -> list[Finding]:
    found, checkpoint = check_writer_memory(load(name, changes), None, PlannedDevice(card, GPUS[card], None))
    assert checkpoint is not None
    return found


def lines(finding: Finding) -> dict[str, float]:
    """The plan's rows in GB, as they are printed."""
    told = [line.strip().removesuffix(" GB").rsplit("  ", 1) for line in finding.text.splitlines() if line.endswith(" GB")]
    return {name.strip(): float(size) for name, size in told}


def statuses(found: Sequence[Finding]) -> list[str]:
    return [finding.status for finding in found]


def test_memory_plan_of_qwen_image_edit_writer_grpo_fits_an_h200() -> None:
    found, loading = check(A, "h200")
    assert found.status == "ok"
    assert loading.text == "loading takes 57.70 GB of CPU memory, for each rank of the machine"
    assert "policy, renderer need" in found.text
    assert "on each of 8 ranks" in found.text
    rows = lines(found)
    assert rows["writer, frozen weights"] == pytest.approx(16.6, rel=0.005)
    assert rows["image model"] == pytest.approx(41, rel=0.005)
    assert "text_encoder" not in rows  # it is the policy itself
    kept = [size for name, size in rows.items() if "one at a time" not in name and name not in ("total", "headroom on h200")]
    in_turn = [size for name, size in rows.items() if "one at a time" in name]
    assert rows["total"] == pytest.approx(sum(kept) + max(in_turn), abs=0.1)
    assert rows["total"] + rows["headroom on h200"] == pytest.approx(GPUS["h200"] / 1e9, abs=0.02)


def test_a_plan_that_leaves_less_than_a_tenth_free_says_that_a_rehearsal_decides() -> None:
    assert statuses(check(FROZEN, "h200")) == ["ok", "note"]
    found, _ = check(FROZEN, "h100")
    assert found.status == "note"
    assert "may not fit: " in found.text
    assert ", of which a tenth must stay free; the plan may be 3% too small, because it estimates activations, and" in found.text
    assert lines(found)["text_encoder"] == pytest.approx(16.6, rel=0.005)


def test_offloading_the_image_model_makes_the_update_fit() -> None:
    changes = ("devices=null", "renderer.batch=1", "microbatch=64", "policy.gradient_checkpointing=true", "rollout.chunk=16")
    together, offloaded = (check(C, "a100-40gb", *changes, *more) for more in ((), ("devices.offload=true",)))
    assert together[0].status == "FAILED"
    assert together[0].fix == "--set devices.offload=true"
    assert offloaded[0].status != "FAILED"
    assert "of offloaded weights in CPU memory" in offloaded[-1].text


def test_prompt_enhancer_has_a_memory_plan_for_each_of_its_three_gpus() -> None:
    found = check(C, "h100")
    assert statuses(found) == ["ok"] * 3
    policy, renderer, _ = map(lines, found)
    assert policy["writer, frozen weights"] == pytest.approx(16.6, rel=0.005)
    assert renderer["image model"] == pytest.approx(2 * 2.085, rel=0.01)
    assert "reward needs 0.61 GB of the 84.93 GB of h100 (cuda:2)" in found[2].text
    (together,) = check(C, "h100", "devices=null")
    assert "policy, renderer, reward need" in together.text
    assert lines(together)["reward, openai/clip-vit-base-patch32"] == pytest.approx(0.61, abs=0.01)


def test_a_part_in_cpu_memory_is_not_compared_with_the_gpu() -> None:
    policy, _, reward, *_ = check(C, "4090", "devices.reward=cpu")
    assert (reward.status, reward.text) == ("note", "reward needs 0.61 GB on cpu")
    assert "of the 25.34 GB of 4090" in policy.text
    (alone, *_) = check(C, "4090", "devices=null", "device=cpu")
    assert "of the 25.34 GB of 4090" in alone.text, "the named GPU stands in for the recipe's device"


@pytest.mark.parametrize(
    ("name", "card", "changes", "next_words"),
    [
        (A, "5090", (), "--device a100-80gb"),
        (A, "4090", ("devices.offload=true",), "--device a100-80gb"),
        (C, "4090", ("microbatch=16",), "--set policy.gradient_checkpointing=true"),
        (C, "4090", ("policy.gradient_checkpointing=true", "microbatch=64"), "--set microbatch=1"),
        (C, "4090", ("microbatch=1",), "--set renderer.batch=1"),
    ],
)
def test_memory_plan_that_does_not_fit_suggests_a_fix(name: str, card: str, changes: tuple[str, ...], next_words: str) -> None:
    failures = [finding for finding in check(name, card, *changes) if finding.status == "FAILED"]
    assert failures
    assert "not fit" in failures[0].text
    assert next_words in {finding.fix for finding in failures}
    if name == C:
        assert "settings that need less: --set" in failures[0].text


def test_following_the_suggested_fixes_makes_the_plan_fit() -> None:
    changes: list[str] = ["microbatch=64"]
    for _ in range(6):
        failures = [finding for finding in check(C, "a100-40gb", *changes) if finding.status == "FAILED"]
        if not failures:
            return
        assert failures[0].fix.startswith("--set ")
        changes.append(failures[0].fix.removeprefix("--set "))
    raise AssertionError(changes)


def test_memory_plan_with_fsdp2_shards_the_writer() -> None:
    whole, sharded = (lines(check(A, "h200", f"sharding={kind}")[0])["writer, frozen weights"] for kind in ("zero2", "fsdp2"))
    replicated = 2 * (2 * 152064 * 3584 + 676_550_144) / 1e9  # embeddings and head, and the vision tower
    assert sharded == pytest.approx(replicated + (whole - replicated) / 8, abs=0.01)
    policy, *_, waiting = check(A, "h200", "sharding=fsdp2", "devices.weights=cpu")
    assert lines(policy)["writer, frozen weights"] == pytest.approx(replicated, abs=0.01)
    assert "GB of the writer's training state in CPU memory, for each rank of the machine" in waiting.text


def test_models_without_a_known_configuration_are_reported_as_not_counted() -> None:
    found = check(C, "h100", 'reward.rewards.taste={"kind": "pickscore"}')
    assert found[-1].status == "note"
    assert "not counted, because their configuration is not known: the models of pickscore" in found[-1].text


def test_training_on_a_benchmark_fails_before_its_download() -> None:
    ((finding, sets),) = check_data(load(A))
    assert (finding.status, sets) == ("FAILED", None)
    assert "Complex-Edit" in finding.text
    assert "GPT-Image-Edit-1.5M" in finding.text
    ((allowed, _),) = check_data(load(A, ["data.allow_test_sets=true"]))
    assert allowed.status == "note"


def test_zero3_is_refused_by_the_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", A, "--set", "sharding=zero3", "--device", "h200"]) != 0
    said = "".join(capsys.readouterr())
    assert "pop from an empty deque" in said
    assert "use zero2" in said


def test_emu3_memory_plan_uses_the_published_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DATA_DIR": "/d",
        "BASE_EXP_DIR": "/r",
        "REWARD_FUNCTION_API_BASE": "http://h:1/v1",
        "RUN_NAME": "x",
    }.items():
        monkeypatch.setenv(f"APP__{name}", value)
    found, *_ = check(D, "h100")
    rows = lines(found)
    assert rows["writer, trained weights"] == pytest.approx(16.98, abs=0.01)
    assert rows["update: activations and logits (one at a time)"] > 16.98  # with all gradients
    assert rows["AdamW's two moments"] == pytest.approx(8.49, abs=0.01)
    assert rows["autoencoder"] == pytest.approx(4 * 0.271, abs=0.01)
    # 16 rows of 1328 tokens and an image of 1072, and two prompts, at 131072 bytes a token.
    assert rows["rollout: cache and logits (one at a time)"] == pytest.approx(131072 * (2 * 1328 + 16 * 2400) / 1e9, abs=0.6)
    assert "parameters: writer 8.49 B, autoencoder 0.27 B" in found.text


@pytest.mark.parametrize("start", ["s", "sc"])
def test_playground_emu3_has_a_memory_plan(start: str) -> None:
    recipe = load("recipes/emu3/sft_sc__rl_sc-playground.jsonnet", [f"policy.model.start={start}"])
    assert isinstance(recipe.policy.model, PlaygroundEmu3)
    folder, _ = recipe.policy.model.find_weights()
    (found,), checkpoint = check_writer_memory(recipe, folder, PlannedDevice("4090", GPUS["4090"], None))
    assert found.status == "ok"
    assert folder is not None
    count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    copies = len(copies_needed(recipe))
    assert checkpoint == count * 4 * (1 + copies + 2)  # AdamW has two moments


@pytest.mark.parametrize(
    ("recipe", "weights"),
    [
        ("recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet", "writer"),
        ("recipes/sd3/prompt-enhancer-playground.jsonnet", "enhancer"),
    ],
)
def test_the_engine_of_a_playground_model_is_checked(recipe: str, weights: str) -> None:
    checked = load(recipe, ['rollout.engine={"kind": "vllm", "url": "http://127.0.0.1:9"}'])
    assert checked.policy.model.base_model == str(playground_weights(weights))
    (found,) = check_engines(checked)
    assert (found.status, found.subject) == ("FAILED", "engine")
    assert "http://127.0.0.1:9" in found.text


_FULL = ('policy.train={"kind":"full"}', 'objective.kl={"kind":"k3","weight":0.1}')
_AVERAGE, _AHEAD = 'policy.ema={"decay":0.99}', "rollout.staleness=2"
_SHARDED = ("devices=null", "ranks=8", "sharding=fsdp2")


@pytest.mark.parametrize(
    ("changes", "on_device", "saved"),
    [
        ((), 1, 1),
        ((_AVERAGE,), 1 + 2, 1 + 2),  # an average of weights in 16 bits is in fp32
        ((_AHEAD,), 1, 1 + 2),  # the copies for stale rollouts are in CPU memory
        ((_AHEAD, "devices.reference=cpu"), 0, 1 + 2),
        ((_AHEAD, *_SHARDED), 1 + 2, 1 + 2),  # FSDP2 shards all copies
    ],
)
def test_weight_copies_are_planned_on_their_device_and_in_their_dtype(changes: tuple[str, ...], on_device: int, saved: int) -> None:
    """In units of the weights, which are in 16 bits. A checkpoint also has fp32 master weights and both moments: 2 + 4."""
    recipe = load(C, (*_FULL, *changes))
    (found, *_), checkpoint = check_writer_memory(recipe, None, PlannedDevice("h200", GPUS["h200"], None))
    rows = lines(found)
    assert rows.get("copies of the trained weights", 0.0) == pytest.approx(on_device * rows["writer, trained weights"], abs=0.02)
    assert checkpoint is not None
    assert checkpoint / 1e9 == pytest.approx((1 + saved + 2 + 4) * 16.58, rel=0.001)
