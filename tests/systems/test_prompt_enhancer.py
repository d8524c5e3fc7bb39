"""A user of a prompt enhancer brings prompts, a Qwen2-VL, Stable Diffusion 3 and CLIP, trains, and enhances prompts."""

import json
from pathlib import Path

import pytest

import retouch
import tiny_models
import tiny_pipelines
import tiny_towers
import tiny_writers
from retouch.cli import main
from retouch_rewards.completions import prompt_quality

PROMPTS = ["a blue orange on a plate", "a round cube", "the idea of silence as a house", "a paper boat made of water"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    root: Path = tmp_path_factory.mktemp("enhancer")
    (root / "challenging.txt").write_text("\n".join([*PROMPTS, "a square wheel", "a glass lion"]))
    tiny_writers.module("qwen2-vl").save_pretrained(root / "qwen")
    tiny_writers.tokenizer().save_pretrained(root / "qwen")
    tiny_models.qwen_image_processor().save_pretrained(root / "qwen")
    tiny_pipelines.sd3().save_pretrained(root / "sd3")
    tiny_towers.clip(root / "clip")
    paths = {"policy.model": "qwen", "renderer.model": "sd3", "reward.rewards.clip": "clip", "data": "challenging.txt"}
    changes = [f"{key}.path={root / name}" for key, name in paths.items()]
    changes += ["devices=null", "device=cpu", f"out={root / 'runs'}", "data.held_out=2", "steps=2", "rollout.max_new_tokens=8"]
    changes += ["renderer.model.size=[32,32]", "renderer.num_steps=2", "renderer.cut_off=draw", "policy.model.dtype=float32"]
    changes += ["renderer.model.dtype=float32", "eval.tasks=2", "eval.batch=2"]
    assert main(["train", "sd3/prompt-enhancer-published", *(word for change in changes for word in ("--set", change))]) == 0
    return root / "runs" / "prompt-enhancer-published"


def test_the_published_recipe_trains_for_two_steps_and_enhances_prompts(run: Path) -> None:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 <= step["reward/clip/similarity"] <= 1 for step in steps)
    writer = retouch.open_writer(str(run))
    assert [reply.text for reply in writer(PROMPTS)] == [writer(prompt).text for prompt in PROMPTS]


def test_a_table_has_the_enhanced_prompt_its_quality_and_its_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the trained enhancer of the playground, because the text of a random one is no prompt."""
    enhancer, prompts = "sd3/prompt-enhancer-playground", ["a red circle", "a green square left of a blue circle"]
    (tmp_path / "list.txt").write_text("\n".join(prompts))
    rewards = {"quality": {"kind": "prompt_quality"}, "red": {"kind": "share", "channel": "red"}}
    reward = json.dumps({"kind": "several", "rewards": rewards, "combine": {"red/share": 1.0}})
    command = ["sample", enhancer, "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out"), "--scores"]
    assert main([*command, "--set", f"reward={reward}", "--set", "eval.column=null"]) == 0
    printed = capsys.readouterr().out
    writer = retouch.open_writer(enhancer)
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    for prompt, line in zip(prompts, lines, strict=True):
        reply, scores = writer(prompt), line["scores"]
        assert (line["text"], line["fell_back"]) == (reply.text, False)
        assert scores["reward"] == scores["red/share"] > 0
        assert reply.prompt is not None
        assert scores["quality/total"] == pytest.approx(prompt_quality(prompt, reply.prompt).total)
        assert f"{prompt}\n  {reply.text}\n" in printed
        assert f"quality/total {scores['quality/total']:.4f}" in printed
        assert f"reward {scores['reward']:.4f}" in printed


@pytest.mark.parametrize(
    ("prompt", "enhanced", "printed"),
    [  # The first three texts are cut off in print; what follows the bar is assumed.
        ("cat", "a beautiful fluffy cat sitting gracefully, high quality, det|ailed, 4k", 5.00),
        ("sunset", "stunning sunset over the ocean, golden hour lighting, cinema|tic, high quality, detailed", 5.00),
        ("robot", "futuristic robot with metallic finish, sci-fi environment, d|etailed", 4.33),
    ],
)
def test_the_scores_of_quality_are_those_that_the_enhancer_prints(prompt: str, enhanced: str, printed: float) -> None:
    assert round(prompt_quality(prompt, enhanced.replace("|", "")).total, 2) == printed
    # The whole text of its other test is printed with 4.85 points and a length of 147; it has five points and 174 characters.
    text = (
        "a beautiful fluffy orange tabby cat sitting gracefully on a windowsill, soft natural lighting, professional pet "
        "photography, high quality, detailed fur texture, 4k resolution"
    )
    assert (prompt_quality("a cat", text).total, len(text)) == (5.0, 174)
