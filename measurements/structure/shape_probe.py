"""The child processes of `shape.py`: each runs a part of the project in a fresh interpreter and prints one JSON object.

    python shape_probe.py load  MODULE:FUNCTION RECIPE
    python shape_probe.py train MODULE:FUNCTION RECIPE OUT STARTED [--calls]
    python shape_probe.py steps MODULE:FUNCTION RECIPE OUT STARTED

`load` calls the function that reads a recipe. `train` calls the console entry with `train RECIPE` and stops at the first call of a
PyTorch module with trainable parameters, which is the first sampling step of the policy. STARTED is `time.time()` of the parent
just before it started this process. With `--calls`, the functions of the project that ran are counted too. This slows the run, so
seconds are measured without `--calls`. `steps` runs two steps of the recipe to their end and counts the functions that ran, in all
and in one call of the function `collect`. The working directory is the checkout.
"""

import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

PROJECT = {path.parent.name for path in Path("src").glob("*/__init__.py")}
FUNCTION = 0x1
"""The flag CO_OPTIMIZED, which code objects of functions have, and those of modules and classes do not."""


def main() -> None:
    task, entry, recipe, *rest = sys.argv[1:]
    sys.path.pop(0)  # remove this folder, so that `sys.path` is that of a console script
    if task == "load":
        load(entry, recipe)
    elif task == "steps":
        steps(entry, recipe, out=rest[0])
    else:
        train(entry, recipe, out=rest[0], started=float(rest[1]), count="--calls" in rest)


def load(entry: str, recipe: str) -> None:
    """Read a recipe and print the seconds and the imported modules."""
    start = time.perf_counter()
    function = resolve(entry)
    function(recipe)
    print(json.dumps({"seconds": time.perf_counter() - start, "torch": "torch" in sys.modules}))


def train(entry: str, recipe: str, *, out: str, started: float, count: bool) -> None:
    """Run `train` up to the first model call and print what ran before it."""
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    def stop(module: Any) -> None:
        seconds = time.time() - started
        sys.setprofile(None)
        threading.setprofile(None)
        found = {
            "seconds": seconds,
            "modules": imported(),
            "packages": sorted({name.partition(".")[0] for name in sys.modules}),
            "functions": functions(codes),
            "model": f"{type(module).__module__}.{type(module).__qualname__}",
        }
        # On the real stdout: the command may have redirected `sys.stdout`.
        os.write(1, b"\n" + json.dumps(found).encode() + b"\n")
        os._exit(0)  # the run needs no clean-up: its folder is temporary

    sys.meta_path.insert(0, FirstCall(stop))
    if count:
        threading.setprofile(profile)
        sys.setprofile(profile)
    code = resolve(entry)(["train", recipe, "--set", f"out={out}"])
    raise SystemExit(f"`train {recipe}` ended with {code} before any model call")


def steps(entry: str, recipe: str, *, out: str) -> None:
    """Run two steps of the recipe and print what ran in them, and in the last call of the project's function `collect`."""
    every: set[CodeType] = set()
    collecting: set[CodeType] = set()
    code_of_collect: CodeType | None = None
    inside = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal inside, code_of_collect
        code = frame.f_code
        if event == "call":
            if code.co_qualname == "collect" and str(frame.f_globals["__name__"]).partition(".")[0] in PROJECT:
                code_of_collect, inside = code, True
                collecting.clear()
            (collecting if inside else every).add(code)
        elif event == "return" and code is code_of_collect:
            inside = False
            every.update(collecting)

    threading.setprofile(profile)
    sys.setprofile(profile)
    code = resolve(entry)(["train", recipe, "--set", f"out={out}", "--set", "steps=2"])
    sys.setprofile(None)
    threading.setprofile(None)
    if code or not collecting:
        raise SystemExit(f"`train {recipe}` ended with {code}, {'after' if collecting else 'without'} a call of `collect`")
    print(json.dumps({"run": functions(every), "collect": functions(collecting)}))


class FirstCall:
    """An import hook that patches PyTorch's module class: the first call of a module with trainable weights calls ``stop``."""

    NAME = "torch.nn.modules.module"

    def __init__(self, stop: Callable[[Any], None]) -> None:
        self.stop = stop

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        assert loader is not None
        execute, stop = loader.exec_module, self.stop

        def patched(module: ModuleType) -> None:
            execute(module)
            original = module.Module.__call__

            def call(instance: Any, *arguments: Any, **options: Any) -> Any:
                if any(parameter.requires_grad for parameter in instance.parameters()):
                    stop(instance)
                return original(instance, *arguments, **options)

            module.Module.__call__ = call

        loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def resolve(entry: str) -> Callable[..., Any]:
    """Import the function that is named by `package.module:name`."""
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def imported() -> list[str]:
    """The names of the project's modules that have been imported."""
    return sorted(name for name in list(sys.modules) if name.split(".")[0] in PROJECT)


def functions(codes: set[CodeType]) -> dict[str, int]:
    """The number of distinct functions of the project that ran, by module. Lambdas count, comprehensions do not."""
    files = {str(getattr(sys.modules[name], "__file__", None)): name for name in imported()}
    ran: dict[str, int] = {}
    for code in codes:
        name = files.get(code.co_filename)
        if name is not None and code.co_flags & FUNCTION and (code.co_name == "<lambda>" or code.co_name[0] != "<"):
            ran[name] = ran.get(name, 0) + 1
    return dict(sorted(ran.items()))


if __name__ == "__main__":
    main()
