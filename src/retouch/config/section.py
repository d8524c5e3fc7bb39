"""The parts of a recipe: ``Section``, the base class of all of them; ``Kinds``, open sets of alternatives; and live objects.

A field is open when its annotation is ``Annotated[Base, KINDS]``: the value of ``kind`` selects a class, which is imported only
when a recipe selects it. The alternatives come from three sources, in this order:

* the table of the set (``{"nft": "retouch.objectives.nft:NFT"}``), and the entries of the wings (``wings.py``);
* entry points of installed packages, group ``retouch.plugins``, named ``<set>.<kind>`` (``objective.theirs``);
* ``{kind: 'import', class: 'my_module:MyClass', args: {...}}``, for any class on the Python path that derives from ``Base``, if the
  user has allowed its module (``retouch.config.consent``).
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, JsonValue, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # the metaclass of BaseModel has no public name
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from retouch.config import consent, other_names, wings
from retouch.config.consent import IMPORT
from retouch.config.imports import CLASS_PATH, import_class, nearest

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
    context = error.get("ctx", {})
    match error["type"]:
        case "union_tag_not_found" | "union_tag_invalid":
            kinds = context.get("expected_tags", "the kinds in docs/recipes.md")
            found, key = f"{context['tag']!r} is not" if "tag" in context else "missing:", context["discriminator"].strip("'")
            return f"{at}.{key}: {found} one of {kinds}"
        case "kind_value":
            return f"{at}{'.' * ('key' in context)}{context.get('key', '')}: {context['message']}"
        case "extra_forbidden":
            near = nearest(last, fields)
            usual = f"did you mean {near}?" if near else f"known here: {', '.join(fields)}"
            return f"{at}: unknown key; {other_names.hint_inside(last, error['input'], section.__name__) or usual}"
        case "missing":
            about = fields[last].description if last in fields else None
            return f"{at}: missing{f': {about}' if about else ''}"
        case "value_error":
            return f"{at}: {error['ctx']['error']}" if at else str(error["ctx"]["error"])
    return f"{at}: {expected(error)}"


_PATTERNS = {
    "cuda": "should be 'auto', 'cuda', 'cuda:0', 'mps' or 'cpu'",
    "._-]*$": "should have only letters, digits, '.', '_' and '-'",
}
"""A part of a regular expression to what it means."""


def expected(error: Mapping[str, Any]) -> str:
    """What pydantic expected, and what it found, of which long values are cut: "should be greater than 0, not -1"."""
    pattern = error.get("ctx", {}).get("pattern", "")
    words = next((words for part, words in _PATTERNS.items() if part in pattern), error["msg"])
    return f"{words[max(words.find('should'), 0) :]}, not {error['input']!r:.200}"


class Section(BaseModel, metaclass=SectionType):
    """Base class of sections. Types are strict (``"3"`` is not a number, 3.5 is not a count), numbers must be finite, and unknown
    keys are errors.

    The text under a field is its documentation.
    """

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


class Imported(Section):
    """A class of your own."""

    kind: Literal["import"]
    class_: ClassPath = Field(alias="class")
    """The class, as ``package.module:Class``."""
    args: dict[str, JsonValue] = Field(default={})
    """The fields of the class."""


_IMPORTED = frozenset(Imported.model_fields)


class Kinds:
    """One open set of alternatives.

    ``name``: what an alternative is called in messages and entry points ("objective"). ``table``: kind to ``module:Class``; several
    kinds may share a class. ``tag``: the key that holds the kind. ``other_names``: a name that is not a kind, in lower case with
    underscores, to what a recipe has in its place; such a name is an error that states it. ``with_wings``: the set has the kinds
    that the wings add under its name, or under this name. Recipes may also import the classes that the wings name for the set.

    An imported class is validated like a built-in one: its fields are the keys of ``args``, unknown keys are errors. An entry
    ``import`` in the table is the section for imported classes that do not derive from the set's base; the keys that it shares with
    the base are given next to ``args`` for all imported classes.
    """

    def __init__(
        self,
        name: str,
        table: Mapping[str, str],
        *,
        tag: str = "kind",
        other_names: Mapping[str, str] | None = None,
        with_wings: bool | str = False,
    ) -> None:
        self.name = name
        self.tag = tag
        self.other_names = dict(other_names or {})
        self._core = dict(table)
        self._wings = name if with_wings is True else with_wings

    @functools.cached_property
    def _table(self) -> dict[str, str]:
        return self._core | (wings.of_set(self._wings) if self._wings else {})

    @property
    def _own(self) -> set[str]:
        return {*self._table.values(), *wings.of_set(f"named.{self.name}").values()}

    @property
    def paths(self) -> Mapping[str, str]:
        """The package's own kinds: kind to ``module:Class``."""
        return dict(self._table)

    def __iter__(self) -> Iterator[str]:
        """Every kind, ``import`` included."""
        yield from dict.fromkeys([*self._table, *self._plugins(), IMPORT])

    def load(self, kind: object) -> type[Section] | None:
        """Import the class of a kind; None for an unknown kind, and for ``import`` without an entry in the table.

        Raises ValueError for a plugin whose class cannot be imported.
        """
        if not isinstance(kind, str):
            return None
        path = self._table.get(kind) or self._plugins().get(kind)
        return None if path is None else import_class(path)

    def classes(self) -> tuple[type[Section], ...]:
        """All classes of the set. Imports every one of them; meant for documentation and error messages."""
        known = dict.fromkeys(found for kind in self if (found := self.load(kind)) is not None)
        return (*known, *(() if IMPORT in self._table else (Imported,)))

    def class_for(self, value: Mapping[str, Any]) -> type[Section] | None:
        """The class that describes this part of a document; None if its kind is missing or unknown."""
        if value.get("kind") == IMPORT and IMPORT not in self._table:
            return Imported
        return self._in_document(value.get(self.tag))

    def _in_document(self, kind: object) -> type[Section] | None:
        """The same as ``load``, for a document. Raises ValueError also for a plugin whose class is no section, or has no field for
        its kind."""
        found = self.load(kind)
        if found is None or self.tag in getattr(found, "model_fields", ()):
            return found
        where = f"{found.__module__}:{found.__qualname__} is installed as the kind {kind!r}, but"
        if not issubclass(found, Section):
            raise ValueError(
                f"{where} is no section; derive it from the base class of a {self.name} (docs/your-own.md), or name it with "
                "kind: 'import'"
            )
        raise ValueError(f'{where} has no field {self.tag}; add to the class: {self.tag}: Literal["{kind}"] = "{kind}"')

    def imported(self, path: str) -> type:
        """Import the class that a recipe names as ``class``.

        Raises ValueError if the user has not allowed its module (then nothing is imported), or if there is no such class.
        """
        consent.require(path, own=self._own)
        return import_class(path)

    def document(self, section: Section) -> dict[str, Any]:
        """The section as JSON, with its kind or its class path, so that a recipe that contains it can be read back."""
        return self._tagged(section, lambda each: each.model_dump(mode="json"))

    def _tagged(self, section: Section, dump: Callable[[Section], dict[str, Any]]) -> dict[str, Any]:
        own, dumped = type(section), dump(section)
        kind = getattr(section, self.tag, None)
        if own is Imported or (kind is not None and self.load(kind) is own):
            return {self.tag: kind, **dumped}
        dumped.pop(self.tag, None)
        shared = {key: dumped.pop(key) for key in self._shared_keys(own) if key in dumped}
        return {"kind": IMPORT, "class": f"{own.__module__}:{own.__qualname__}", "args": dumped, **shared}

    def _plugins(self) -> dict[str, str]:
        """Kinds of installed packages: kind to ``module:Class``."""
        prefix = f"{self.name}."
        entries = [entry for entry in consent.plugins() if entry.name.startswith(prefix)]
        return {entry.name.removeprefix(prefix): entry.value for entry in reversed(entries)}

    def __get_pydantic_core_schema__(self, base: type[Section], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def validate(value: Any, info: core_schema.ValidationInfo) -> Any:
            return value if isinstance(value, base) else self._parse(value, base, json_input=info.mode == "json")

        dumped = core_schema.wrap_serializer_function_ser_schema(self._tagged, schema=core_schema.any_schema())
        return core_schema.with_info_plain_validator_function(validate, serialization=dumped)

    def _parse(self, value: Any, base: type[Section], *, json_input: bool) -> Any:
        if not isinstance(value, Mapping):
            known = self.load(value) if isinstance(value, str) else None
            needed = (
                [] if known is None else [f"'{name}': ..." for name, field in known.model_fields.items() if field.is_required()]
            )
            example = f": {{'{self.tag}': {', '.join([repr(value), *needed])}}}" if known is not None else ""
            raise PydanticCustomError(
                "kind_type", "{message}", {"message": f"Input should be an object with a {self.tag}{example}"}
            )
        if value.get("kind") == IMPORT and (IMPORT not in self._table or self._derives(value, base)):
            return self._import(value, base, json_input=json_input)
        discriminator = {"discriminator": f"'{self.tag}'"}
        if self.tag not in value:
            every = {"expected_tags": ", ".join(map(repr, self))}
            raise PydanticCustomError("union_tag_not_found", "missing kind", {**discriminator, **every})
        kind = value[self.tag]
        if (known := self._in_document(kind)) is not None:
            return _validated(known, value, json_input=json_input)
        if (present := self.other_names.get(str(kind).lower().replace("-", "_").replace(" ", "_"))) is not None:
            message = f"{kind!r} is not a {self.tag}; write {present}"
            raise PydanticCustomError("kind_value", "{message}", {"message": message, "key": self.tag})
        context = {**discriminator, "tag": kind, "expected_tags": ", ".join(map(repr, self))}
        raise PydanticCustomError("union_tag_invalid", "unknown kind", context)

    def _import(self, value: Mapping[str, Any], base: type[Section], *, json_input: bool) -> Section:
        shared = {key: value[key] for key in value if key in self._shared_keys(base)}
        section = _validated(Imported, {key: value[key] for key in value if key not in shared}, json_input=json_input)
        found = self.imported(section.class_)
        if not issubclass(found, base):
            raise ValueError(f"{section.class_} is no {self.name}: derive the class from {base.__module__}.{base.__qualname__}")
        try:
            made: Section = _validated(found, {**section.args, **shared}, json_input=True)
            return made
        except ValidationError as error:
            # The same errors, with "args" before their location, except for errors of the shared keys.
            details: list[InitErrorDetails] = []
            for one in error.errors(include_url=False):
                mistake: Any = one["type"]
                if mistake == "value_error" or "error" in one.get("ctx", {}):
                    message = {"message": str(one.get("ctx", {}).get("error", one["msg"]))}
                    mistake = PydanticCustomError("kind_value", "{message}", message)
                location = one["loc"] if one["loc"] and one["loc"][0] in shared else ("args", *one["loc"])
                details.append(InitErrorDetails(type=mistake, loc=location, input=one["input"], ctx=one.get("ctx", {})))
            raise ValidationError.from_exception_data(error.title, details) from None

    def _derives(self, value: Mapping[str, Any], base: type[Section]) -> bool:
        """Whether the class can be imported and derives from the base. Raises ValueError if it is not allowed."""
        path = value.get("class")
        if not isinstance(path, str) or not CLASS_PATH.fullmatch(path):
            return False
        consent.require(path, own=self._own)
        try:
            return issubclass(import_class(path), base)
        except ValueError:
            return False

    def _shared_keys(self, section: type[Section]) -> list[str]:
        """The keys of the section that are given next to ``args`` if its class is imported."""
        other = self.load(IMPORT)
        return [] if other is None else [key for key in other.model_fields if key in section.model_fields and key not in _IMPORTED]


def _validated(section: type[Section], value: Mapping[str, Any], *, json_input: bool) -> Any:
    # Strict JSON accepts a list for a tuple; strict Python input does not.
    return section.model_validate_json(json.dumps(value)) if json_input else section.model_validate(value)


# Objects that exist only in this process, such as a function or a loaded pipeline. A section that stands for one contains its name
# and its identity; the object itself is in a table that is active while a run is built. So a recipe stays plain JSON.
LIVE = "python:"
"""Prefix of the name of a loaded model, which stands in place of a path in a recipe."""

_ACTIVE: ContextVar[Mapping[str, Any] | None] = ContextVar("live_objects", default=None)


@contextmanager
def live_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let sections find these objects by their names inside the block."""
    token = _ACTIVE.set(objects)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def live_object(name: str, *, key: str) -> Any:
    """The object of this name.

    ``key``: the recipe's key, for the message. Raises ValueError if the object is not in this process: the recipe was written by a
    run that was started from Python, and has to be opened in the same way.
    """
    try:
        return (_ACTIVE.get() or {})[name]
    except KeyError:
        raise ValueError(
            f"{key}: {name} is a Python object of the script that started this run; run that script again, with "
            "retouch.Trainer(...), or name a class or a path in its place"
        ) from None
