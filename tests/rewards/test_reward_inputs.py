"""What a reward of the user depends on: each change that may change its scores is noticed and named, and nothing else is."""

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from retouch.rewards.identity import inputs_of, remember_inputs

REWARD = """
import functools, dataclasses, types
import numpy as np
import helpers.outer
from helpers import constants
FACTOR = 1.0
UNUSED = 1
def unused(): return UNUSED
def inner(x, scale=2.0): return x * scale
def plain(images, **kwargs): return [inner(FACTOR) for _ in images]
def with_default(images, factor=1.0, **kwargs): return [factor for _ in images]
def with_keyword(images, *, table={"a": [1, {2, 3}]}, **kwargs): return [1.0 for _ in images]
def deep(images, **kwargs): return [helpers.outer.score(i) for i in images]
def lazy(images, **kwargs):
    from helpers.inner import score
    return [score(i) for i in images]
def names_a_constant(images, **kwargs): return [constants.LIMIT for _ in images]
bound = functools.partial(with_default, factor=1.0)
class Base:
    limit = 1.0
    def help(self, image): return self.limit
class Scorer(Base):
    def __init__(self, weights=1.0, device="cpu"): self.weights, self.device, self.calls = np.full(3, weights), device, 0
    def __call__(self, images, **kwargs):
        self.calls += 1
        return [self.help(i) for i in images]
    def method(self, images, **kwargs): return self(images)
@dataclasses.dataclass
class Data:
    weight: float = 1.0
    def __call__(self, images, **kwargs): return [self.weight for _ in images]
class Slots:
    __slots__ = ("weight",)
    def __init__(self, weight): self.weight = weight
    def __call__(self, images, **kwargs): return [self.weight for _ in images]
def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs): return function(*args, **kwargs)
    return wrapper
@decorated
def wrapped(images, **kwargs): return [1.0 for _ in images]
@functools.lru_cache
def table(): return 1.0
def cached(images, **kwargs): return [table() for _ in images]
scorer, method, data, slots = Scorer(), Scorer().method, Data(), Slots(1.0)
def connected(images, client=types.MappingProxyType({"a": iter(())}), **kwargs): return [1.0 for _ in images]
"""
HELPERS = {
    "helpers/__init__.py": "",
    "helpers/constants.py": "LIMIT = 1.0\n",
    "helpers/outer.py": "from .inner import score\n",
    "helpers/inner.py": "def score(image): return 1.0\n",
}


def described(folder, name, *, reward=REWARD, **changed):
    """The parts of the reward ``name`` of the module ``own_reward``. ``changed``: the content of a helper, by its name."""
    for file, content in {**HELPERS, "own_reward.py": reward, **changed}.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content)
    for module in [each for each in sys.modules if each.partition(".")[0] in ("own_reward", "helpers")]:
        del sys.modules[module]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    sys.dont_write_bytecode, kept = True, sys.dont_write_bytecode
    try:
        return inputs_of(getattr(importlib.import_module("own_reward"), name))[0]
    finally:
        sys.dont_write_bytecode = kept


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "old", "new", "part"),
    [
        ("plain", "FACTOR = 1.0", "FACTOR = 2.0", "the global FACTOR of own_reward"),
        ("plain", "return x * scale", "return x + scale", "the code of own_reward.inner"),
        ("plain", "scale=2.0", "scale=3.0", "the default scale of own_reward.inner"),
        ("with_default", "factor=1.0, **", "factor=2.0, **", "the default factor of own_reward.with_default"),
        ("with_keyword", "{2, 3}", "{2, 4}", "the default table of own_reward.with_keyword"),
        ("bound", "(with_default, factor=1.0)", "(with_default, factor=2.0)", "the argument factor"),
        ("scorer", "weights=1.0, d", "weights=2.0, d", "self.weights"),
        ("method", "weights=1.0, d", "weights=2.0, d", "self.weights"),
        ("scorer", "limit = 1.0", "limit = 2.0", "own_reward.Base.limit"),
        ("scorer", "return self.limit", "return 2 * self.limit", "the code of own_reward.Base.help"),
        ("data", "weight: float = 1.0", "weight: float = 2.0", "self.weight"),
        ("slots", "Slots(1.0)", "Slots(2.0)", "self.weight"),
        ("wrapped", "return function(*a", "return 2 * function(*a", "the code of own_reward.wrapped"),
        (
            "wrapped",
            "def wrapped(images, **kwargs): return [1",
            "def wrapped(images, **kwargs): return [2",
            "the code of own_reward.wrapped (2)",
        ),
        ("cached", "def table(): return 1.0", "def table(): return 2.0", "the code of own_reward.table"),
    ],
)
def test_point_1_2_a_change_of_a_reward_is_noticed_and_named(project, name, old, new, part):
    before, after = described(project, name), described(project, name, reward=REWARD.replace(old, new))
    assert REWARD.replace(old, new) != REWARD
    assert part in [key for key in {**before, **after} if before.get(key) != after.get(key)], (before, after)


@pytest.mark.parametrize(
    ("name", "helper", "part"),
    [
        ("deep", "helpers/inner.py", "the file of helpers.inner"),
        ("lazy", "helpers/inner.py", "the file of helpers.inner"),
        ("names_a_constant", "helpers/constants.py", "helpers.constants.LIMIT"),
    ],
)
def test_point_1_2_a_change_of_a_helper_module_is_noticed(project, name, helper, part):
    before = described(project, name)
    after = described(project, name, **{helper: HELPERS[helper].replace("1.0", "0.25")})
    assert before.keys() == after.keys()
    assert part in [key for key in before if before[key] != after[key]]


@pytest.mark.parametrize("name", ["plain", "deep", "bound", "data"])
def test_point_1_2_what_a_reward_does_not_use_may_change(project, name):
    changed = (
        REWARD.replace("UNUSED = 1", "UNUSED = 2").replace("return UNUSED", "return 3").replace('device="cpu"', 'device="cuda"')
    )
    assert described(project, name) == described(project, name, reward=changed)


def test_point_1_2_an_unchanged_reward_has_the_same_parts_in_every_process(project):
    names = ("plain", "with_keyword", "deep", "lazy", "scorer", "method", "data", "wrapped", "bound")
    here = {name: described(project, name) for name in names}
    program = (
        "import json, own_reward; from retouch.rewards.identity import inputs_of\n"
        f"print(json.dumps({{name: inputs_of(getattr(own_reward, name))[0] for name in {names}}}))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project), *sys.path]), "PYTHONHASHSEED": "7"}
    for file in project.rglob("*.py"):
        file.touch()
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=project
    )
    assert json.loads(found.stdout) == here


def test_point_1_2_what_a_run_itself_changes_in_its_reward_is_no_change(project):
    described(project, "scorer")
    scorer: Any = sys.modules["own_reward"].scorer
    start = inputs_of(scorer)[0]
    scorer([None])
    remember_inputs(scorer, start)
    assert inputs_of(scorer)[0] == start
    scorer.weights[0] = 2.0
    assert {key for key, value in inputs_of(scorer)[0].items() if start[key] != value} == {"self.calls", "self.weights"}
    unknown = inputs_of(sys.modules["own_reward"].connected)[1]
    assert unknown == ["the default client of own_reward.connected['a'] (builtins.tuple_iterator)"]


def test_point_1_2_code_without_a_file_or_a_module_is_described():
    def made(factor):
        names: dict[str, Any] = {}
        exec(f"def typed(images, **kwargs): return [{factor} for _ in images]", names)
        return inputs_of(names["typed"])

    assert made("1.0") == made("1.0") != made("2.0")
