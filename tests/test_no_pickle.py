"""Nothing in the package unpickles, evaluates text or runs a repository's code: read off the source's syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from source_files import source_files

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "torch.save",
    "numpy.load",
    "np.load",
    "pandas.read_pickle",
    "pd.read_pickle",
}
FLAGS = {"trust_remote_code", "allow_pickle"}


def faults(source: str) -> Iterator[str]:
    """What the source does that it may not."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from [module] * (module.split(".")[0] in MODULES)
            yield from (name for alias in node.names if (name := f"{module}.{alias.name}") in LOADERS)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in LOADERS:
            yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in CALLS and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.keyword) and node.arg in FLAGS and not _is_false(node.value):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in FLAGS:
            yield f"{node.value!r} as text"


def restricted(source: str) -> bool:
    """Whether torch's loader is called once, and by nothing but its restricted half."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"]
    flags = [keyword.value for node in calls for keyword in node.keywords if keyword.arg == "weights_only"]
    return len(calls) == len(flags) == 1 and isinstance(flags[0], ast.Constant) and flags[0].value is True


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_package() -> None:
    files = list(source_files().values())
    assert len(files) > 50
    found = {str(file): said for file in files if (said := list(faults(file.read_text(encoding="utf-8"))))}
    # Features of others, where a recipe trusts their maker, and IP-Adapters that are converted.
    exception = {file: said for file, said in found.items() if file.endswith("models/parts.py") and said == ["torch.load"]}
    assert all(restricted(Path(file).read_text(encoding="utf-8")) for file in exception)
    # A method of a pipeline class that is already imported, with a `yield` in two places: no text from outside is compiled.
    method = {file for file, said in found.items() if file.endswith("any_pipeline/model.py") and said == ["compile"]}
    assert found.keys() - exception.keys() - method == set()


@pytest.mark.parametrize("call", ["torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=safe)"])
def test_the_loader_is_the_restricted_one(call: str) -> None:
    assert restricted("torch.load(f, weights_only=True)")
    assert not restricted(call)
    assert not restricted(f"torch.load(f, weights_only=True)\n{call}")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import numpy, dill as d",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "numpy.load(path)",
        "read = torch.load",
        "eval(text)",
        "run = exec",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=trusted)",
        "f(**{'trust_remote_code': True})",
        "numpy.lib.format.read_array(file, allow_pickle=True)",
    ],
)
def test_the_reader_sees(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source",
    [
        "module.eval()",
        "re.compile(text)",
        "f(trust_remote_code=False)",
        "class C:\n    eval: int = 3",
        "safetensors.torch.load_file(p)",
    ],
)
def test_the_reader_lets_pass(source: str) -> None:
    assert not list(faults(source))
