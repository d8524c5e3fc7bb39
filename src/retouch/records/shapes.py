"""The shapes of the records in a run's folder: which keys a reader may rely on, with which types.

A folder may be damaged, or come from another person. What these shapes accept, the page of runs and the report can compute with:
numbers within 1e100, so that no sum of squares overflows, and steps from 0 to 2**53. Further keys are allowed.
"""

from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

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
    tokens: NotRequired[list[list[Any]]]
    states: NotRequired[list[str | None]]


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
