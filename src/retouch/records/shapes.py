"""Strict JSON: a text means the same value to every reader, and no value is too large or too deep to work with.

The records of a run also have shapes (``checked``), because its folder may be damaged, or come from another person.
"""

import json
import math
from typing import Annotated, Any, NoReturn, NotRequired, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

MOST_DEPTH = 100
MOST_DIGITS = 300


def strict_json(text: str | bytes | bytearray) -> Any:
    """Parse a JSON value.

    Raises ValueError if the text is not UTF-8, for NaN and infinity, a number that is too large for a float, an integer of more
    than ``MOST_DIGITS`` digits, a repeated key, and values that are nested more than ``MOST_DEPTH`` deep.
    """
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    try:
        value = DECODER.decode(decoded)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value] if decoded.count("[") + decoded.count("{") > MOST_DEPTH else []
    for _ in range(MOST_DEPTH):
        items = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in items if isinstance(item, dict | list)]
    if level:
        raise ValueError("nested too deep")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is too large for a JSON number")
    return value


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"{digits:.40} has more than {MOST_DIGITS} digits")
    return int(digits)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return fields


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, parse_int=_integer, object_pairs_hook=_no_repeats)


# The shapes of the records in a run's folder: which keys a reader may rely on, with which types. The page of runs and the report
# can compute with what they accept: numbers within 1e100, so that no sum of squares overflows, and steps from 0 to 2**53. Further
# keys are allowed.

Shape: TypeAlias = TypeAdapter[Any]
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Number = Annotated[float, Field(ge=-1e100, le=1e100)]
_Value = _Number | None
_Pair = Annotated[list[_Value], Field(min_length=2, max_length=2)]


def checked(shape: Shape, value: Any, where: str) -> Any:
    """Return the value. Raises ValueError, which begins with ``where``, if it does not have the shape."""
    try:
        shape.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part)[:60] for part in first["loc"])
        raise ValueError(f"{where}: {key}: {first['msg']}; another program has changed the file") from None
    return value


def _with_step(line: Any) -> Any:
    if isinstance(line, dict) and type(line.get("step")) is int and 0 <= line["step"] <= 2**53:
        return line
    raise ValueError("step should be a whole number from 0 to 2**53")


class _Alarm(TypedDict):
    text: str
    rule: NotRequired[str]


class _AlarmStop(TypedDict):
    step: _Count
    back_to: _Count | None
    alarms: list[_Alarm]


class _Check(TypedDict):
    name: str
    ok: bool
    text: NotRequired[str | None]


class _Evaluation(TypedDict):
    step: _Count
    split: str
    table: dict[str, dict[str, _Value]]
    ci95: dict[str, dict[str, _Pair]]
    lower_is_better: NotRequired[list[str]]
    missing: NotRequired[dict[str, _Count]]


class _Cell(TypedDict):
    mean: _Value
    low: _Value
    high: _Value
    n: NotRequired[_Count]


class _Suite(TypedDict):
    step: _Count
    suite: str
    headline: str
    table: dict[str, dict[str, _Cell]]
    missing: _Count
    alarm: str | None


class _Sample(TypedDict):
    step: _Count
    set: str
    task: str
    instruction: str
    group: _Count
    slot: _Count
    image: str | None
    source: str | None
    target: str | None
    scores: dict[str, _Value]
    reward: _Value
    advantage: _Value
    tags: dict[str, Any]
    text: NotRequired[str | None]


class _Summary(TypedDict):
    column: str
    on: str
    before: _Number
    after: _Number
    steps: _Count
    ceiling: NotRequired[_Value]
    best_of_k: NotRequired[_Value]
    k: NotRequired[_Count | None]
    gain_ci95: NotRequired[Annotated[list[_Number], Field(min_length=2, max_length=2)] | None]
    independent_tasks: NotRequired[_Count | None]
    needed_tasks: NotRequired[_Count | None]
    lower_is_better: NotRequired[bool]
    cost: NotRequired[dict[str, Any]]


class _Scores(TypedDict):
    tasks: list[str]
    rewards: list[_Value]
    scores: dict[str, list[_Value]]
    sources: NotRequired[list[str]]


METRICS: Shape = TypeAdapter(Annotated[dict[str, _Value | str], BeforeValidator(_with_step)])
"""A line of the metrics or timings."""
ALARM: Shape = TypeAdapter(_AlarmStop)
CHECKS: Shape = TypeAdapter(list[_Check])
EVALUATION: Shape = TypeAdapter(_Evaluation)
SUITE: Shape = TypeAdapter(_Suite)
SAMPLE: Shape = TypeAdapter(_Sample)
SUMMARY: Shape = TypeAdapter(_Summary)
SCORES: Shape = TypeAdapter(_Scores)
