"""The reward section: every kind parses to its class and back, and invalid values are reported when the recipe is parsed."""

import json
from pathlib import Path
from typing import get_args

import pytest
from test_recipe import BASE

from retouch.config.errors import kinds_of
from retouch.recipe.derived_facts import differences
from retouch.recipe.document import apply
from retouch.recipe.recipe import parse
from retouch.recipe.reward_arguments import parse_reward, read_combined, read_reward
from retouch.rewards.base import NoReward, RewardSection
from retouch.rewards.function import ImportedReward
from retouch.rewards.kinds import KINDS as REWARDS
from retouch.rewards.kinds import RunReward
from retouch.rewards.parts import PARTS
from retouch_serve.remote import RemoteReward

ROOT = Path(__file__).parents[2]
JUDGE = {"kind": "endpoint", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
KINDS = PARTS.classes()
FOLDER = {"kind": "folder", "path": "photos"}
ASPECTS = {"kind": "aspects", "judge": JUDGE, "combine": {"alignment": 0.6, "quality": 0.4, "identity": 0}}


def least(kind):
    """The section with only its required keys."""
    given = {"colour": [1, 2, 3], "judge": JUDGE, "head": "head.safetensors", "weights": "lpips.safetensors", "class": "mine:Red"}
    given |= {"endpoints": ["http://127.0.0.1:8700"], "path": "weights", "name": "brightness", "source": "0" * 16, "queue": "votes"}
    given["of"] = {"kind": "hpsv3"}
    keys = {field.alias or name: field for name, field in kind.model_fields.items()}
    tag, (name, *_) = kinds_of(kind)
    return {tag: name} | {key: given[key] for key, field in keys.items() if field.is_required() and key != tag}


def document(reward, **changes):
    made = {**BASE, "data": FOLDER, "reward": reward}
    return apply(made, [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changes.items()])


def refusal(reward, **changes):
    with pytest.raises(ValueError, match=r".") as caught:
        parse(document(reward, **changes))
    return str(caught.value).splitlines()


def several(**rewards):
    return {"kind": "several", "rewards": rewards, "combine": "0.5 * judge/alignment + 0.5 * clip/similarity"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_read_written_and_read_again(kind):
    section = parse_reward(least(kind))
    assert type(section) is kind
    assert parse_reward(REWARDS.document(section)) == section
    if not isinstance(section, ImportedReward | RemoteReward):
        assert section.known_columns()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_default_kind_of_a_reward_class_is_its_kind_in_the_table(kind):
    """In Python, a reward class is created without ``kind``; its document contains the kind."""
    assert REWARDS.load(kind.model_fields["kind"].default) is kind


def test_every_reward_of_the_package_is_a_kind():
    """Only classes with a ``kind``; the base classes of judges have none."""
    named = {*REWARDS.classes(), NoReward}  # imports every module that has one
    found, left = set(), [RewardSection]
    while left:
        left += (subclasses := left.pop().__subclasses__())
        found |= set(subclasses)
    own = {one for one in found if one.__module__.startswith("retouch") and "kind" in one.model_fields}
    assert own == named
    of_runs = get_args(RunReward)[1]
    assert set(of_runs.classes()) == own


def test_the_page_of_rewards_names_every_kind_with_its_columns():
    rows = [line for line in (ROOT / "docs" / "rewards.md").read_text().splitlines() if line.startswith("| `")]
    for kind in KINDS:
        section = parse_reward(least(kind))
        (row, *_) = [row for row in rows if f"`{section.kind}`" in row.split("|")[1]]
        own = [name for name, column in (section.known_columns() or {}).items() if not column.diagnostic]
        assert [name for name in own if f"`{name}`" not in row.split("|")[2]] == [], section.kind


def test_a_document_with_several_rewards_parses_to_the_same_recipe():
    recipe = parse(document(several(clip={"kind": "clip"}, judge={k: v for k, v in ASPECTS.items() if k != "combine"})))
    written = recipe.document()["reward"]
    assert written["rewards"]["clip"] == {"kind": "clip", "path": "openai/clip-vit-base-patch32", "device": None}
    assert written["rewards"]["judge"]["n_evals"] == 3
    assert "combine" not in written["rewards"]["judge"]
    assert parse(json.loads(json.dumps(recipe.document()))) == recipe
    assert list(recipe.reward.known_columns()) == [
        *("clip/cosine", "clip/clip_score", "clip/similarity", "clip/truncated"),
        *("judge/alignment", "judge/quality", "judge/identity"),
    ]


TWO = {"clip": {"kind": "clip"}, "judge": {"kind": "aspects", "judge": JUDGE}}


@pytest.mark.parametrize(
    ("reward", "changes", "line"),
    [
        (
            ASPECTS,
            {"reward__combine": {"alignmnt": 1}},
            "reward.combine: names the column 'alignmnt', but the reward has no such column; it has alignment, quality, identity; "
            "did you mean 'alignment'?",
        ),
        (ASPECTS, {"reward__combine": "sqrt(alignment - quality)"},
         r"reward.combine: sqrt of (alignment - quality), which may be as low as -1"),
        (ASPECTS, {"reward__combine": "0.6 alignment"}, "reward.combine: '0.6 alignment': there is 'alignment' at character 5"),
        ({"kind": "import", "class": "mine:Own", "combine": "a +"}, {}, "reward.combine: 'a +': the formula ends"),
        ({"kind": "import", "class": "mine:Own", "combine": {"a": 0}}, {}, "reward.combine: all weights are 0"),
        ({"kind": "import", "class": "mine:Own", "combine": ""}, {}, "reward.combine: empty"),
        (ASPECTS, {"reward__combine": 3}, "reward.combine: should be a weight for each column, such as {overall: 1}, or a formula"),
        (ASPECTS, {"reward__combine": {"alignment": "x"}}, "reward.combine.alignment: should be a valid number, not 'x'"),
        ({"kind": "clip", "combine": {"truncated": 1}}, {}, "reward.combine: names 'truncated', which is a diagnostic"),
        ({"kind": "aspects", "judge": JUDGE}, {}, "reward.combine: empty; name at least one column"),
        (several(**TWO), {"reward__combine": "alignment + similarit"}, "reward.combine: names the column 'similarit'"),
        (several(**TWO), {"reward__rewards__clip__pth": "x"},
         "reward.rewards.clip.pth: unknown key; did you mean reward.rewards.clip.path?"),
        (several(**TWO), {"reward__rewards__judge__judge__modle": "x"},
         "reward.rewards.judge.judge.modle: unknown key; did you mean reward.rewards.judge.judge.model?"),
        (several(**TWO), {"reward__rewards__clip__kind": "clp"}, "reward.rewards.clip.kind: 'clp' is not one of"),
        (several(**TWO), {"reward__rewards__clip__combine": {"similarity": 1}},
         "reward.rewards.clip: combine and max_missing belong to all rewards together"),
        (several(**TWO), {"reward__rewards__clip__path": 3}, "reward.rewards.clip.path: should be a valid string, not 3"),
        (several(lone={"kind": "lpips"}), {}, "reward.rewards.lone.weights: missing: A safetensors file with AlexNet's features"),
        (several(**{"a/b": {"kind": "ocr"}}), {}, "reward.rewards.a/b"),
        ({"kind": "several", "rewards": {}, "combine": "a"}, {}, "reward.rewards: should have at least 1 item"),
        ({"kind": "ocr", "reader": {"kind": "paddleocr"}, "line_width": 160, "combine": {"correctness": 1}}, {},
         "reward.line_width: it is only for RapidOCR, but the reader is paddleocr"),
        ({"kind": "ocr", "reader": {"kind": "paddle"}, "combine": {"correctness": 1}}, {},
         "reward.reader.kind: 'paddle' is not 'paddleocr'"),
        (ASPECTS, {"reward__temperature": 0}, "reward.n_evals: 3 answers at temperature 0 are all the same"),
        (ASPECTS, {"data": {"kind": "prompts", "path": "p.txt"}, "policy__model": {"kind": "sd3", "path": "x", "size": [64, 64]}},
         "reward.aspects: identity compares with a source image, but data.kind 'prompts' has none"),
        ({"kind": "thinking", "combine": {"think_format": 1}}, {},
         "reward.kind: thinking scores the text that a policy wrote, but this policy makes images"),
        ({"kind": "win_rate", "judge": JUDGE, "combine": {"win_rate": 1}}, {},
         "eval.column: win_rate compares the images of a task"),
        ({"kind": "win_rate", "judge": JUDGE, "combine": {"win_rate": 1}}, {"eval__column": "win_rate"},
         "eval.column: win_rate compares the images of a task"),
        ({"kind": "win_rate", "judge": JUDGE, "combine": {"win_rate": 1}}, {"rollout__chunk": 8},
         "rollout.chunk: 8 splits groups of 6, but win_rate compares whole groups"),
        (ASPECTS, {"reward__judge__quota": {"cost": 5.0}},
         "reward.judge.quota.cost: the cost is computed from prices, and none are given"),
        (ASPECTS, {"eval__column": "qality"}, "eval.column: the reward gives no 'qality'; did you mean 'quality'?"),
        (ASPECTS, {"reward__judge__kind": "endpont"},
         "reward.judge.kind: 'endpont' is not one of 'endpoint', 'in_process', 'import'; did you mean 'endpoint'?"),
        ({"kind": "remote", "endpoints": [], "combine": {"a": 1}}, {}, "reward.endpoints: should have at least 1 item"),
        ({"kind": "remote", "endpoints": ["http://h:1"], "columns": {"a": [0, 1]}, "combine": {"b": 1}}, {},
         "reward.combine: names the column 'b'"),
    ],
)  # fmt: skip
def test_invalid_reward_values_are_reported_when_the_recipe_is_parsed(reward, changes, line):
    assert any(found.startswith(line) for found in refusal(reward, **changes))


def test_an_api_key_or_an_address_with_credentials_is_rejected_and_not_in_the_error():
    for key in ("sk-canary-5f1c0ffee9d34b7aa1", "my key", "lower_case"):
        (line,) = refusal(ASPECTS, reward__judge__key=key)
        assert line.startswith("reward.judge.key: give the name of an environment variable, such as OPENAI_API_KEY")
        assert key not in line
    for url in ("http://me:sk-canary-1@host/v1", "https://host/v1?key=sk-canary-1", "host:8000/v1", "file:///etc/passwd"):
        (line,) = refusal(ASPECTS, reward__judge__base_url=url)
        assert line.startswith("reward.judge.base_url: give ")
        assert "canary" not in line
    address = "http://10.0.0.1:4877/v1"
    for url in (address, address.removesuffix("/v1"), address.removesuffix("v1"), f"{address}/"):
        assert parse(document(ASPECTS, reward__judge__base_url=url)).reward.judge.base_url == address


def test_a_run_can_resume_with_another_judge_connection_but_not_another_judge_model():
    old = parse(document(several(**TWO)))
    reached = {"base_url": "http://127.0.0.1:10/v1", "concurrency": 4, "deadline": 5.0, "key": None, "attempts": 9}
    changes = {f"reward__rewards__judge__judge__{key}": value for key, value in reached.items()}
    assert differences(old, parse(document(several(**TWO), reward__rewards__clip__device="cpu", **changes))) == []
    other = parse(document(several(**TWO), reward__rewards__judge__judge__model="another", reward__rewards__judge__n_evals=5))
    assert [line.split(":")[0] for line in differences(old, other)] == [
        "reward.rewards.judge.judge.model",
        "reward.rewards.judge.n_evals",
    ]
    remote = {"kind": "remote", "endpoints": ["http://h:1"], "combine": {"a": 1.0}}
    moved = {**remote, "endpoints": ["http://h:2", "http://h:3"], "wait": 3.0}
    assert differences(parse(document(remote)), parse(document(moved))) == []


def test_read_reward_accepts_short_forms_classes_and_files(tmp_path):
    assert read_reward("ocr") == {"kind": "ocr"}
    assert read_reward("clip:models/clip") == read_reward("clip=models/clip") == {"kind": "clip", "path": "models/clip"}
    assert read_reward("lpips:w.safetensors") == {"kind": "lpips", "weights": "w.safetensors"}
    assert read_reward("remote:http://h:1") == {"kind": "remote", "endpoints": ["http://h:1"]}
    assert read_reward("mine.rewards:Red") == {"kind": "import", "class": "mine.rewards:Red"}
    (tmp_path / "judge.jsonnet").write_text(f"{json.dumps(ASPECTS)} + {{ n_evals: 5 }}")
    assert read_combined(str(tmp_path / "judge.jsonnet")) == {**ASPECTS, "n_evals": 5}
    assert "combine" not in read_reward(str(tmp_path / "judge.jsonnet"))
    assert read_combined("recipes/quickstart.jsonnet")["combine"] == {"overall": 1.0}
    for word, says in [
        ("clp", "reward.kind: 'clp' is not one of .*; did you mean 'clip'"),
        ("lpips", "reward.weights: missing"),
        ('{"kind": "ocr", "thread": 2}', "reward.thread: unknown key; did you mean reward.threads"),
    ]:
        with pytest.raises(ValueError, match=says):
            parse_reward(read_reward(word))
