"""The child processes of `shape.py`: each runs a part of the project in a fresh interpreter and prints one JSON object.

    python shape_probe.py load  MODULE:FUNCTION RECIPE
    python shape_probe.py train MODULE:FUNCTION RECIPE OUT STARTED [--calls]

`load` calls the function that reads a recipe. `train` calls the console entry with `train RECIPE` and stops at the first call of a
PyTorch module with trainable parameters, which is the first sampling step of the policy. STARTED is `time.time()` of the parent
just before it started this process. With `--calls`, the functions of the project that ran are counted too. This slows the run, so
seconds are measured without `--calls`.
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
from types import CodeType, FrameType, ModuleType
from typing import Any

PROJECT = "retouch"
FUNCTION = 0x1
"""The flag CO_OPTIMIZED, which code objects of functions have, and those of modules and classes do not."""


def main() -> None:
    task, entry, recipe, *rest = sys.argv[1:]
    sys.path.pop(0)  # remove this folder, so that `sys.path` is that of a console script
    if task == "load":
        load(entry, recipe)
    else:
        train(entry, recipe, out=rest[0], started=float(rest[1]), count="--calls" in rest)


def load(entry: str, recipe: str) -> None:
    """Read a recipe and print the seconds and the imported modules."""
    start = time.perf_counter()
    function = resolve(entry)
    function(recipe)
    print(json.dumps({"seconds": time.perf_counter() - start, "torch": "torch" in sys.modules, "modules": imported()}))


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
            "caller": caller(),
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
    return sorted(name for name in list(sys.modules) if name.split(".")[0] == PROJECT)


def functions(codes: set[CodeType]) -> dict[str, int]:
    """The number of distinct functions of the project that ran, by module. Lambdas count, comprehensions do not."""
    files = {str(getattr(sys.modules[name], "__file__", None)): name for name in imported()}
    ran: dict[str, int] = {}
    for code in codes:
        name = files.get(code.co_filename)
        if name is not None and code.co_flags & FUNCTION and (code.co_name == "<lambda>" or code.co_name[0] != "<"):
            ran[name] = ran.get(name, 0) + 1
    return dict(sorted(ran.items()))


def caller() -> str:
    """The innermost function of the project on the call stack, as `module.function`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.split(".")[0] == PROJECT:
            return f"{name}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "?"


if __name__ == "__main__":
    main()
