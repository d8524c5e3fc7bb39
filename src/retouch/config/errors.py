"""Short lines about the mistakes in a recipe: the full path of the key, the mistake, and what was probably meant."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from retouch.config.consent import IMPORT
from retouch.config.imports import CLASS_PATH, did_you_mean, nearest
from retouch.config.kinds import Kinds
from retouch.config.schema import (
    alternatives,
    annotation_of,
    field_at,
    is_list,
    is_map,
    is_text_list,
    keys_of,
    kinds_of,
    open_kinds,
    places,
    section_for,
)
from retouch.config.section import DEPENDENT_DEFAULT, UNTAGGED, Section, expected

Path = tuple[str | int, ...]

_PLACES_NAMED = 3


def unknown_keys(document: Mapping[str, Any], root: type[Section]) -> list[str]:
    """A line for each key that the schema does not have."""
    return list(_unknown(document, root, root, (root,), ()))


def _unknown(
    value: Mapping[str, Any], section: type[Section], root: type[Section], siblings: tuple[type[Section], ...], path: Path
) -> Iterator[str]:
    known = keys_of(section)
    for key, inner in value.items():
        here = (*path, key)
        if key not in known:
            yield f"{dotted(here)}: unknown key{_hint(key, section, root, siblings, path)}"
            continue
        annotation = annotation_of(known[key])
        if is_list(annotation):
            entries = [((*here, k), entry) for k, entry in enumerate(inner)] if isinstance(inner, list) else []
        elif is_map(annotation):
            entries = [((*here, name), entry) for name, entry in inner.items()] if isinstance(inner, dict) else []
        else:
            entries = [(here, inner)]
        for place, entry in entries:
            if isinstance(entry, dict) and (found := section_for(annotation, entry)) is not None:
                yield from _unknown(entry, found, root, alternatives(annotation), place)
                if (kinds := open_kinds(annotation)) is not None and entry.get("kind") == IMPORT:
                    yield from _unknown_arguments(entry, kinds, root, place)


def _unknown_arguments(value: Mapping[str, Any], kinds: Kinds, root: type[Section], path: Path) -> Iterator[str]:
    """Yield a line for each unknown key in the ``args`` of an imported class, if it is a section; its fields are the known keys."""
    arguments, named = value.get("args"), value.get("class")
    if isinstance(arguments, dict) and isinstance(named, str) and CLASS_PATH.fullmatch(named):
        with suppress(ValueError):  # reported when the value itself is validated
            own = kinds.imported(named)
            if issubclass(own, Section):
                yield from _unknown(arguments, own, root, (own,), (*path, "args"))


def _hint(key: str, section: type[Section], root: type[Section], siblings: tuple[type[Section], ...], path: Path) -> str:
    """The hint for an unknown key.

    The present name of a renamed key; else, for a class of the user's own, where its fields go; else the kinds that have the key;
    else the keys of the section that start with it (``clip_low`` and ``clip_high`` for ``clip``) or the nearest one, and the other
    places where the key is known; else the keys that are known here.
    """
    if key in section.renamed_keys:
        return f"; it is now called {dotted((*path, section.renamed_keys[key]))}"
    if _kinds(section) == (IMPORT,) and "args" in keys_of(section):
        return f"; the fields of your class go into {dotted((*path, 'args'))}"
    if others := [kind for sibling in siblings if key in keys_of(sibling) for kind in _kinds(sibling)]:
        own = f"this is {' or '.join(map(repr, _kinds(section)))}" if _kinds(section) else "this has no kind"
        return f"; only {' or '.join(map(repr, others))} has it, and {own}"
    hints = []
    longer = [known for known in keys_of(section) if known.startswith(f"{key}_")]
    if meant := longer or [known for known in keys_of(section) if known == nearest(key, keys_of(section))]:
        hints.append(f"did you mean {_listed([dotted((*path, known)) for known in meant])}?")
    if elsewhere := [place for place in places(root).get(key, ()) if place != dotted((*path, key))]:
        hints.append(f"there is {_listed(elsewhere)}")
    if not hints and (near := nearest(key, places(root))):
        hints.append(f"did you mean {_listed(list(places(root)[near]))}?")
    return "; " + "; ".join(hints or [f"known here: {', '.join(keys_of(section))}"])


def _kinds(section: type[Section]) -> tuple[str, ...]:
    tagged = kinds_of(section)
    return () if tagged is None else tagged[1]


def _listed(paths: list[str]) -> str:
    return " or ".join(paths[:_PLACES_NAMED]) + (" or ..." if len(paths) > _PLACES_NAMED else "")


def wrong_values(error: ValidationError, document: Mapping[str, Any], root: type[Section]) -> list[str]:
    """A line for each value that pydantic refused. Unknown keys and defaults that follow from a refused value are left out."""
    return [
        _line(dict(one), document, root)
        for one in error.errors(include_url=False, include_context=True)
        if one["type"] not in ("extra_forbidden", DEPENDENT_DEFAULT)
    ]


def _line(error: dict[str, Any], document: Mapping[str, Any], root: type[Section]) -> str:
    path = document_path(error["loc"], document)
    context, given = error.get("ctx", {}), error["input"]
    match error["type"]:
        case "missing":
            field = field_at(root, document, path)
            return f"{dotted(path)}: missing{': ' + field.description if field is not None and field.description else ''}"
        case "union_tag_not_found":
            return f"{_tag_path(path, context)}: missing: one of {_tags(field_at(root, document, path))}"
        case "union_tag_invalid":
            given, options = context["tag"], context["expected_tags"]
            return f"{_tag_path(path, context)}: {given!r} is not one of {options}{_meant(given, options)}"
        case "literal_error":
            return f"{dotted(path)}: {given!r} is not {context['expected']}{_meant(given, context['expected'])}"
        case "string_pattern_mismatch":
            if context["pattern"] == f"^{CLASS_PATH.pattern}$":
                return f"{dotted(path)}: {given!r} is not the path of a class; write package.module:Class, with a colon"
            return f"{dotted(path)}: {given!r} does not match {context['pattern']}"
        case "kind_value":
            return f"{dotted((*path, context['key']) if 'key' in context else path)}: {context['message']}"
        case "value_error":
            return f"{dotted(path)}: {context['error']}" if path else str(context["error"])
        case "tuple_type" if isinstance(given, str):
            # The second field is for an entry of a map of lists.
            field = field_at(root, document, path) or field_at(root, document, path[:-1])
            if field is not None and is_text_list(annotation_of(field)):
                entries = [each.strip() for each in given.split(",")]
                return f"{dotted(path)}: {expected(error)}; write {json.dumps(entries, ensure_ascii=False)}"
    return f"{dotted(path)}: {expected(error)}"


def _tag_path(path: Path, context: Mapping[str, Any]) -> str:
    given = context["discriminator"].strip("'")
    return dotted((*path, "kind" if given.endswith("()") else given))


def _tags(field: FieldInfo | None) -> str:
    """The kinds that a section in this field may have."""
    sections = alternatives(annotation_of(field)) if field is not None else ()
    return ", ".join(repr(kind) for section in sections for kind in _kinds(section))


def _meant(given: object, expected: str) -> str:
    options = [option.strip(" '") for option in expected.replace(" or ", ",").split(",")]
    return did_you_mean(given, options) if isinstance(given, str) else ""


def document_path(location: tuple[int | str, ...], document: Any) -> Path:
    """The path of an error in the document: pydantic's location without the kinds that pydantic inserts between the keys."""
    path: list[str | int] = []
    node = document
    for part in location:
        if part in ("[key]", UNTAGGED, "formula") and not (isinstance(node, dict) and part in node):
            continue
        if isinstance(node, dict) and part not in node and part in (node.get("kind"), node.get("mode")):
            continue
        path.append(part)
        inside = isinstance(node, dict) or (isinstance(node, list) and isinstance(part, int) and part < len(node))
        node = (node.get(part) if isinstance(node, dict) else node[part]) if inside else None
    return tuple(path)


def dotted(path: Path) -> str:
    """``("phases", 0, "steps")`` as ``phases.0.steps``."""
    return ".".join(map(str, path))
