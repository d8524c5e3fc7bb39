"""The base class of every part of a recipe: a frozen, typed record that accepts no unknown keys."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # the metaclass of BaseModel has no public name

from retouch.config.imports import nearest

UNTAGGED = "(no kind)"
"""The tag of a section without a kind, which distinguishes it from alternatives that have a kind."""

DEPENDENT_DEFAULT = "default_factory_not_called"
"""The type of pydantic's error for a default that follows from another value, which was refused."""


class SectionType(ModelMetaclass):
    """Makes a section that is created in Python raise ValueError with a recipe's messages ("Lora: rank: should be ..., not 0"), and
    accept a list wherever a recipe has a list."""

    def __call__(cls, *values: Any, **keys: Any) -> Any:
        fields = cls.model_fields  # type: ignore[attr-defined]
        lists = {key for key in keys if key in fields and _has_tuple(fields[key].annotation)}
        given = {key: _as_tuple(value) if key in lists else value for key, value in keys.items()}
        try:
            return super().__call__(*values, **given)
        except ValidationError as error:
            errors = [one for one in error.errors(include_url=False) if one["type"] != DEPENDENT_DEFAULT]
            lines = [_mistake(cls, dict(one)) for one in errors]
        raise ValueError("\n".join(f"{cls.__name__}: {line}" for line in lines))


def _has_tuple(annotation: Any) -> bool:
    """Whether values of this type may be tuples. The values of a dict do not count."""
    origin = get_origin(annotation)
    return origin is tuple or (origin is not dict and any(_has_tuple(part) for part in get_args(annotation)))


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(part) for part in value) if isinstance(value, list) else value


def _mistake(section: Any, error: Mapping[str, Any]) -> str:
    *_, last = path = [str(part) for part in error["loc"]] or [""]
    at, fields = ".".join(path), section.model_fields
    match error["type"]:
        case "extra_forbidden":
            near = nearest(last, fields)
            return f"{at}: unknown key; " + (f"did you mean {near}?" if near else f"known here: {', '.join(fields)}")
        case "missing":
            about = fields[last].description if last in fields else None
            return f"{at}: missing{f': {about}' if about else ''}"
        case "value_error":
            return f"{at}: {error['ctx']['error']}" if at else str(error["ctx"]["error"])
    return f"{at}: {expected(error)}"


def expected(error: Mapping[str, Any]) -> str:
    """What pydantic expected, and what it found, of which long values are cut: "should be greater than 0, not -1"."""
    return f"{error['msg'][max(error['msg'].find('should'), 0) :]}, not {error['input']!r:.200}"


class Section(BaseModel, metaclass=SectionType):
    """Base class of sections. Types are strict (``"3"`` is not a number, 3.5 is not a count), numbers must be finite, and unknown
    keys are errors.

    The text under a field is its documentation. ``renamed_keys``: former name to present name of keys; a recipe with a former name
    gets an error that states the present name.
    """

    renamed_keys: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
    )


NonEmpty: TypeAlias = Annotated[str, Field(min_length=1)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
StepInterval: TypeAlias = Annotated[int, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0.0, le=1.0)]
Positive: TypeAlias = Annotated[float, Field(gt=0.0)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0.0)]
Pixels: TypeAlias = tuple[Count, Count]
ClassPath: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
