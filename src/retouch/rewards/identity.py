"""The fingerprint of a reward: it changes if the scores may change, so that a resumed run can detect another reward.

For a reward of the user, it contains its code, the code of its own project that it uses, and their values: the attributes of
objects, the variables of closures, defaults, the bound arguments of partials, and the global variables that the code names. Modules
of the standard library and of installed packages are left out. The description is the same in every process that would give the
same scores: it contains no address, no order of a set and no path of a file.
"""

import ast
import datetime
import decimal
import dis
import enum
import fractions
import functools
import hashlib
import inspect
import json
import logging
import re
import sys
import textwrap
import types
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path, PurePath
from typing import Any, Protocol, runtime_checkable

from retouch.config import wings
from retouch.config.imports import is_library
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection
from retouch.types import Json


@runtime_checkable
class Fingerprinted(Protocol):
    """A reward whose scores depend on more than its class and columns: a rubric in a file, the weights of a model, its arguments.

    The fingerprint contains no URL: the same judge at another URL is the same judge.
    """

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class Wrapper(Protocol):
    """A reward that returns the scores of the reward that it wraps, for example a cache."""

    @property
    def wrapped(self) -> Reward: ...


def describe(reward: Reward) -> dict[str, Json]:
    """A description of everything that decides the scores, as JSON: the code, the columns, and the ``fingerprint`` of the reward
    or, if it has none, its arguments.

    A reward of this package is described by its kind and its ``version``, so its module may move. Any other class is described by
    its path and a hash of its module's source (of the path, if there is no source). Functions and classes of the user also have
    ``inputs``, a hash for each part that their scores depend on, and ``unknown``, the parts whose content is not known.
    """
    while isinstance(reward, Wrapper):
        reward = reward.wrapped
    made_by, kind = type(reward), getattr(reward, "kind", None)
    packaged = wings.is_own(made_by.__module__)
    code: dict[str, Json]
    if packaged and kind is not None:
        code = {"kind": kind, "version": getattr(made_by, "version", 1)}
    else:
        path = f"{made_by.__module__}:{made_by.__qualname__}"
        try:
            text = inspect.getsource(sys.modules[made_by.__module__])
        except (OSError, TypeError):  # a class that was typed into Python has no source
            text = path
        code = {"class": path, "source": hashlib.sha256(text.encode()).hexdigest()[:16]}
    if isinstance(reward, Fingerprinted):
        own: Json = reward.fingerprint
    else:
        own = reward.arguments() if isinstance(reward, RewardSection) else None
    described: dict[str, Any] = {
        **code,
        "columns": {name: list(astuple(column)) for name, column in reward.columns.items()},
        "own": own,
    }
    if packaged and kind != "function":
        return described
    inputs, unknown = inputs_of(_of_the_user(reward))
    return {**described, "inputs": inputs, **({"unknown": unknown} if unknown else {})}


def remember_run(reward: Reward, began_with: Mapping[str, Any]) -> None:
    """At the end of a run, let the user's objects in the reward be described as at its start, unless they are changed later.

    ``began_with``: the result of ``describe`` at the start.
    """
    while isinstance(reward, Wrapper):
        reward = reward.wrapped
    for name, part in (_parts(began_with["own"]) or {}).items():
        remember_run(reward.rewards[name], part)  # type: ignore[attr-defined]
    if "inputs" in began_with:
        remember_inputs(_of_the_user(reward), began_with["inputs"])


def _of_the_user(reward: Reward) -> Any:
    """The function or the object of the user that scores."""
    model = getattr(reward, "model", None)
    return model.function if getattr(reward, "kind", None) == "function" and model is not None else reward


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each difference between two descriptions of a reward; nothing if both describe the same scores."""
    for key, new in now.items():
        was = before.get(key)
        if was == new or key == "unknown":
            continue
        if key == "inputs":
            yield from changed_keys(was or {}, new)
            continue
        parts, new_parts = (_parts(each) if key == "own" else None for each in (was, new))
        if key == "source":
            yield f"the code of {now['class']} was changed"
        elif parts is not None and new_parts is not None and parts.keys() == new_parts.keys():
            yield from (f"{name}: {line}" for name in parts for line in changes(parts[name], new_parts[name]))
        else:
            yield f"{key}: {was} in the run, {new} now"


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each key that is only in one of the mappings, or whose values differ."""
    for key in sorted({**before, **now}):
        if before.get(key) != now.get(key):
            yield f"{key} {'is new' if key not in before else 'is gone' if key not in now else 'was changed'}"


def _parts(own: object) -> dict[str, Any] | None:
    """The descriptions inside the fingerprint of a ``CompositeReward``, by name; None for any other fingerprint."""
    if not isinstance(own, str) or not own.startswith("{"):
        return None
    try:
        parts = json.loads(own)
    except ValueError:
        return None
    return parts if all(isinstance(part, dict) and "columns" in part for part in parts.values()) else None


def fingerprint(reward: Reward) -> str:
    """16 hexadecimal digits of the SHA-256 of ``describe(reward)``."""
    return short(describe(reward))


def short(described: object) -> str:
    """16 hexadecimal digits of the SHA-256 of a description in JSON."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


_BY_REPR = (
    *(bool, int, float, complex, str, bytes, bytearray, range, slice, type(None), type(Ellipsis)),
    *(decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, uuid.UUID, PurePath, re.Pattern),
)
"""Types of values that have no other content than their ``repr``."""
_GLOBALS, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions of Python's byte code."""
_PLACES = ("device",)
"""Attributes that say where something is computed, and that may differ when a run resumes."""
_EMPTY = types.CellType()
"""The cell of a variable that has no value yet; it equals only cells of this kind."""
_LEFT: dict[str, dict[str, str]] = {}
"""For the hash of a description at the end of a run of this process: the description at its start."""


def inputs_of(reward: Any) -> tuple[dict[str, str], list[str]]:
    """A hash for each part that the scores of a function, a class or an object depend on, and the parts whose content is not known,
    such as a connection or an object of an installed package; both are sorted.

    What a run of this process changed in its reward, for example a count of the calls, is as it was when that run began.
    """
    code = reward.func if isinstance(reward, functools.partial) else reward
    found = _Inputs(own=getattr(code, "__module__", None) or type(code).__module__)
    found.describe(reward, "self")
    made = dict(sorted(found.parts.items()))
    return _LEFT.get(_hash(repr(made)), made), sorted(found.unknown)


def remember_inputs(reward: Any, began_with: dict[str, str]) -> None:
    """Let ``inputs_of`` describe the reward as at the start of a run, as long as nothing but that run has changed it."""
    _LEFT[_hash(repr(dict(sorted(inputs_of(reward)[0].items()))))] = began_with


def _hash(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:16]


class _Inputs:
    """Collects the parts. ``describe`` returns text that is equal for equal values; code becomes a part with a name of its own."""

    def __init__(self, own: str) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: set[str] = set()
        self._own = own  # the module of the reward, of which only the used code counts
        self._open: dict[int, Any] = {}  # values that are being described, to end at a cycle
        self._seen: dict[int, Any] = {}  # code that was described; the reference keeps its id from being used again

    def describe(self, value: Any, name: str) -> str:
        """Describe a value. ``name``: what it is called in the parts and in messages; "self" for the reward or its object."""
        if id(value) in self._open:
            return "cycle"
        self._open[id(value)] = value
        try:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            if isinstance(value, enum.Enum):
                return f"{self._class(type(value))}.{value.name}"
            if isinstance(value, _BY_REPR):
                return f"{kind} {value!r}"
            if isinstance(value, Mapping):
                pairs = [(self.describe(key, name), self.describe(inner, f"{name}[{key!r:.40}]")) for key, inner in value.items()]
                return f"{kind} {sorted(pairs)}"
            if isinstance(value, list | tuple | deque):
                return f"{kind} {[self.describe(inner, f'{name}[{place}]') for place, inner in enumerate(value)]}"
            if isinstance(value, set | frozenset):
                return f"{kind} {sorted(self.describe(inner, name) for inner in value)}"
            if isinstance(value, functools.partial):
                bound = {f"the argument {key}": inner for key, inner in [*enumerate(value.args), *value.keywords.items()]}
                return f"{self.describe(value.func, name)} {self._values(bound)}"
            if isinstance(value, types.MethodType):
                return f"{self.describe(value.__func__, name)} {self.describe(value.__self__, name)}"
            if isinstance(value, types.FunctionType):
                return self._function(value)
            if isinstance(value, type):
                return self._class(value)
            if isinstance(value, types.ModuleType):
                return self._module(value.__name__)
            if inner := [getattr(value, each) for each in ("__wrapped__", "__func__", "func", "fget") if hasattr(value, each)]:
                return f"{kind} {self.describe(inner[0], name)}"  # a cached function, a static method, a property
            return self._object(value, name, kind)
        finally:
            del self._open[id(value)]

    def _object(self, value: Any, name: str, kind: str) -> str:
        """Describe an object: its numbers, weights or pixels; of an object of the project, its class and its attributes."""
        if hasattr(value, "state_dict") and hasattr(value, "named_parameters"):  # a torch module
            state = [f"{key} {self.describe(inner, name)}" for key, inner in value.state_dict().items()]
            own = [each for each in value.modules() if not _is_packaged(type(each))]
            settings = [[(key, inner) for key, inner in vars(each).items() if key[0] != "_" and key != "training"] for each in own]
            return f"{kind} {state} {[self._class(type(each)) for each in own]} {self.describe(settings, name)}"
        if hasattr(value, "detach") and hasattr(value, "numpy"):
            import torch

            bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return f"tensor {value.dtype} {tuple(value.shape)} {_hash(bits.numpy().tobytes())}"
        if hasattr(value, "tobytes") and hasattr(value, "getbands"):
            return f"image {value.mode} {value.size} {_hash(value.tobytes())}"
        if hasattr(value, "__array__"):
            import numpy

            array = numpy.asarray(value)
            content = self.describe(array.ravel().tolist(), name) if array.dtype.hasobject else _hash(array.tobytes())
            return f"{kind} {array.dtype.str} {array.shape} {content}"
        if isinstance(value, RewardSection):
            return f"{self._class(type(value))} {value.version} {value.arguments()} {getattr(value, 'fingerprint', '')}"
        plain = isinstance(value, types.SimpleNamespace) or hasattr(value, "__dataclass_fields__") or wings.is_own(kind)
        if _is_packaged(type(value)) and not plain:
            if not hasattr(value, "__name__") and not isinstance(value, logging.Logger):
                self.unknown.add(f"{name} ({kind})")
            return f"{kind} {getattr(value, '__module__', '')}.{getattr(value, '__name__', '')}"
        if hasattr(type(value), "fingerprint"):
            return f"{self._class(type(value))} {value.fingerprint}"
        own = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
        slots = [slot for each in own for slot in ([each] if isinstance(each, str) else each)]
        attributes = {**{slot: getattr(value, slot) for slot in slots if hasattr(value, slot)}, **getattr(value, "__dict__", {})}
        described = {}
        for key, inner in sorted(attributes.items()):
            if key not in _PLACES and not key.startswith("__"):
                described[key] = self.describe(inner, f"{name}.{key}")
                if name == "self":
                    self._put(f"self.{key}", described[key])
        return f"{self._class(type(value))} {described}"

    def _values(self, values: Mapping[str, Any]) -> list[str]:
        """Describe values and make each of them a part."""
        made = []
        for name, value in values.items():
            made.append(self.describe(value, name))
            self._put(name, made[-1])
        return made

    def _put(self, name: str, described: str) -> None:
        number, label, hashed = 1, name, _hash(described)
        while self.parts.get(label, hashed) != hashed:  # two closures of one function, two classes of one name
            number += 1
            label = f"{name} ({number})"
        self.parts[label] = hashed

    def _function(self, function: types.FunctionType) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        if id(function) in self._seen or _is_packaged(function):
            return name
        self._seen[id(function)] = function
        code, around = function.__code__, function.__globals__
        text = _source(code)
        self._put(f"the code of {name}", text or _bytecode(code))
        arguments = inspect.signature(function, follow_wrapped=False).parameters.values()
        values = {f"the default {each.name} of {name}": each.default for each in arguments if each.default is not each.empty}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        values |= {f"the variable {key} around {name}": cell.cell_contents for key, cell in cells if cell != _EMPTY}
        values |= {f"{name}.{key}": value for key, value in vars(function).items() if not key.startswith("__")}
        # The names of the globals and of the attributes that the code, and the functions that it defines, use.
        steps = [each for part in _with_inner(code) for each in dis.get_instructions(part)]
        used, attributes = ({each.argval for each in steps if each.opname in kind} for kind in (_GLOBALS, _ATTRIBUTES))
        for key in sorted(used & around.keys()):
            values[f"the global {key} of {function.__module__}"] = around[key]
            if isinstance(around[key], types.ModuleType) and not _is_packaged(around[key]):
                inner = vars(around[key])
                values |= {f"{around[key].__name__}.{each}": inner[each] for each in sorted(attributes & inner.keys())}
        self._values({label: value for label, value in values.items() if not isinstance(value, types.ModuleType)})
        for value in values.values():
            if isinstance(value, types.ModuleType):
                self._module(value.__name__)
        self._imports(text, around.get("__package__"))
        self._module(function.__module__)
        return name

    def _class(self, made: type) -> str:
        name = f"{made.__module__}.{made.__qualname__}"
        if id(made) in self._seen or _is_packaged(made):
            return name
        self._seen[id(made)] = made
        self._put(f"the code of {name}", _source(made))
        for base in made.__mro__[1:]:
            self._class(base)
        for key, value in sorted(vars(made).items()):
            code = getattr(value, "__code__", None)
            if code is not None and not (code.co_filename == "<string>" and hasattr(made, "__dataclass_fields__")):
                self._function(value)
            elif isinstance(value, property | staticmethod | classmethod | functools.cached_property):
                self.describe(value, f"{name}.{key}")
            elif not key.startswith(("_abc_", "__", "model_")) and not inspect.isdatadescriptor(value) and code is None:
                self._values({f"{name}.{key}": value})
        self._module(made.__module__)
        return name

    def _module(self, module: str | None, spec: ModuleSpec | None = None) -> str:
        """Add the file of another module of the project, and the files of the modules that it imports. ``module``: None for code
        that was given to ``exec``."""
        if module is None:
            return ""
        spec = spec or _spec(module)
        label = f"the file of {module}"
        if module in ("__main__", self._own) or spec is None or label in self.parts:
            return module
        if spec.origin is not None and spec.origin.endswith(".py") and not is_library(spec.origin):
            text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
            self.parts[label] = _hash(text)
            self._imports(text, spec.parent)
        return module

    def _imports(self, text: str, package: str | None) -> None:
        """Add the modules of the project that the code imports, wherever it does. In ``from a import b``, ``a.b`` may be one."""
        try:
            nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
        except SyntaxError:  # a lambda is part of a statement
            return
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                above = (package or "").split(".")
                inside = above[: len(above) - node.level + 1] if node.level else []
                module = ".".join([*inside, *([node.module] if node.module else [])])
                found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        for module in sorted(found - {""}):
            if (spec := _spec(module)) is not None:
                self._module(module, spec)


def _is_packaged(made: Any) -> bool:
    """Whether a class, a function or a module belongs to Python, to Retouch or to an installed package."""
    name = made.__name__ if isinstance(made, types.ModuleType) else made.__module__
    module = sys.modules.get(str(name))
    file = getattr(module, "__file__", None)
    return is_library(file) if file is not None else module is not None and name != "__main__"


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _with_inner(inner)


def _source(made: Any) -> str:
    """The source of a class or of code; empty if it is not known. Of a lambda, only its own part of the lines."""
    try:
        text = inspect.getsource(made)
    except (OSError, TypeError):
        return ""
    if getattr(made, "co_name", None) == "<lambda>":
        places = [place for place in made.co_positions() if None not in place]
        return f"{text}{min(place[2] for place in places)}-{max(place[3] for place in places)}" if places else text
    return text


def _bytecode(code: types.CodeType) -> str:
    """Code that was typed into Python has no source."""
    constants = [_bytecode(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _spec(module: str) -> ModuleSpec | None:
    """Find a module without importing it or its packages; None if there is none, or if its package is an installed one."""
    path, found = None, None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:depth]), path)
        if found is None or (found.origin is not None and is_library(found.origin)):
            return None
        path = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
    return found
