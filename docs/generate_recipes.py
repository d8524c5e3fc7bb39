"""Writes docs/recipes.md and docs/recipes-*.md, the keys of a recipe, from the schema that checks it.

`python docs/generate_recipes.py` writes them all.
"""

import json
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from retouch.config.errors import alternatives, annotation_of, is_list, is_map, keys_of, kinds_of, open_kinds
from retouch.config.section import Imported, Section
from retouch.recipe.recipe import Recipe

PAGES = Path(__file__).parent
OWN_PAGES = ("policy", "rollout", "renderer", "data", "reward", "advantage", "objective")
"""Keys of a recipe whose sections have a page of their own."""
_INTRODUCTION = """# The keys of a recipe

`python docs/generate_recipes.py` makes these pages from the schema, and a test compares the two. A recipe is a
[Jsonnet](https://jsonnet.org) (or JSON) file. It is checked as a whole before anything is loaded: unknown keys, values of the wrong
type and combinations that cannot work are errors that name the key and say what to write instead. `--set a.b=value` changes one key
from the command line; the value is read as JSON, otherwise as text. `retouch recipes` lists the included recipes.

Keys without a default are required. Sections with several forms have a `kind` (or `mode`) that selects the form; only the keys of
that form are allowed. `kind: 'import'` uses a class of your own ([your-own.md](your-own.md)), from a module that you have
allowed with `--allow-import`.
"""
_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    links = ", ".join(f"[`{key}`](recipes-{key}.md)" for key in OWN_PAGES)
    top = [_INTRODUCTION, f"The sections {links} have pages of their own.", "", "## The top level", ""]
    written = {"": [*top, *_table(Recipe, inherited=True)]}
    written |= {key: [f"# Recipe keys: `{key}`", "", "[All keys of a recipe](recipes.md)."] for key in OWN_PAGES}
    done: set[type[Section]] = set()
    found, told = list(_sections(Recipe, "", done)), set[type[Section]]()
    for path, section in found:
        key = path.partition(".")[0]
        lines = written[key if key in OWN_PAGES else ""]
        for base in _bases(section):
            if base not in told:
                told.add(base)
                lines += ["", f"## `{path}`, common to {_sharers(base, path, found)}", "", _plain(base.__doc__ or ""), ""]
                lines += _table(base)
        tagged = kinds_of(section)
        form = "" if tagged is None else f", {tagged[0]} {' or '.join(f'`{kind}`' for kind in tagged[1])}"
        lines += ["", f"## `{path}`{form}", "", _plain(section.__doc__ or ""), "", *_table(section)]
    return {f"recipes{'-' * bool(key)}{key}.md": "\n".join(lines) + "\n" for key, lines in written.items()}


def _bases(section: type[Section]) -> list[type[Section]]:
    """What the section has in common with others, outermost first: sections with keys that are of no kind themselves."""
    above = [base for base in section.__mro__[:0:-1] if issubclass(base, Section) and base is not Section]
    return [base for base in above if _own(base) - {"kind"} and kinds_of(base) is None]


def _own(section: type[Section]) -> set[str]:
    """The fields that the section itself declares."""
    return set(vars(section).get("__annotations__", {})) & set(section.model_fields)


def _sharers(base: type[Section], path: str, found: list[tuple[str, type[Section]]]) -> str:
    """The kinds at this place that have what the base has."""
    here = [section for place, section in found if place == path and section is not Imported]
    sharers = [section for section in here if base in _bases(section)]
    names = [f"`{kind}`" for section in sharers for kind in (kinds_of(section) or ("", ()))[1]]
    return "all" if sharers == here or not names else ", ".join(names)


def _sections(section: type[Section], path: str, done: set[type[Section]]) -> Iterator[tuple[str, type[Section]]]:
    """Every section with the place at which it is met first; all kinds of a place come before their own sections."""
    for key, field in keys_of(section).items():
        annotation = annotation_of(field)
        place = f"{path}{key}" + (".0" if is_list(annotation) else ".NAME" if is_map(annotation) else "")
        new = [inner for inner in alternatives(annotation) if inner not in done]
        done.update(new)
        for inner in new:
            yield place, inner
        for inner in new:
            yield from _sections(inner, f"{place}.", done)


def _table(section: type[Section], *, inherited: bool = False) -> Iterator[str]:
    """The section's own keys; those that it shares with others are listed once, above them, unless ``inherited`` asks for all."""
    tagged = kinds_of(section)
    shared = set() if inherited else {name for base in _bases(section) for name in base.model_fields} - _own(section)
    keys = {key: field for key, field in keys_of(section).items() if key not in shared and key != (tagged or ("kind",))[0]}
    if not keys:
        yield "No keys of its own."
        return
    yield "| key | value | default | |"
    yield "| --- | --- | --- | --- |"
    for key, field in keys.items():
        value = _described(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)
        yield f"| `{key}` | {value} | {_default(field)} | {_plain(field.description or '')} |"


def _described(annotation: Any) -> str:
    """What a value may be, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated and open_kinds(annotation) is None:
        bounds = [_bound(part) for part in _constraints(arguments[1:]) if isinstance(part, Ge | Gt | Le | Lt)]
        return " ".join([_described(arguments[0]), " and ".join(bounds)]).strip()
    if origin in (Union, types.UnionType):
        if types.NoneType in arguments:
            return _described(Union[tuple(part for part in arguments if part is not types.NoneType)]) + " or null"  # noqa: UP007
        if not alternatives(annotation):
            return " or ".join(_described(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(argument)}`" for argument in arguments)
    if origin is tuple:
        repeated = arguments[-1] is Ellipsis
        return f"a list of: {_described(arguments[0])}" if repeated else f"[{', '.join(map(_described, arguments))}]"
    if origin is dict:
        return f"a map from {_described(arguments[0])} to {_described(arguments[1])}"
    if sections := alternatives(annotation):
        forms = [f"`{form}`" for section in sections for form in (kinds_of(section) or ("", ()))[1]]
        return f"section {', '.join(forms)}".strip()
    return _NAMES.get(annotation, "any JSON")


def _constraints(metadata: Iterable[Any]) -> Iterator[Any]:
    """pydantic keeps some of them in a FieldInfo of their own."""
    for part in metadata:
        yield from part.metadata if isinstance(part, FieldInfo) else [part]


def _bound(part: Ge | Gt | Le | Lt) -> str:
    name, words = _BOUNDS[type(part)]
    return f"{words} {getattr(part, name):g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    if field.default_factory is not None:
        return "as described"
    value = field.default
    if isinstance(value, Section):
        value = value.model_dump(mode="json", exclude_unset=True)
    return "as below" if value == {} and not isinstance(field.default, Mapping) else f"`{json.dumps(value)}`"


def _plain(text: str) -> str:
    """A docstring without its example, as Markdown on one line."""
    return " ".join(text.partition("Example::")[0].split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
