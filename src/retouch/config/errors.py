"""Short lines about the mistakes in a recipe: the full path of the key, the mistake, and what was probably meant."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from retouch.config import other_names
from retouch.config.consent import IMPORT
from retouch.config.imports import CLASS_PATH, did_you_mean, nearest
from retouch.config.section import DEPENDENT_DEFAULT, UNTAGGED, Kinds, Section, expected

Path = tuple[str | int, ...]

_PLACES_NAMED = 3


def mistakes(error: ValidationError, document: Mapping[str, Any], root: type[Section]) -> ValueError:
    """The error for the user about a document that pydantic refused: a line for each unknown key and for each refused value.

    Imports every kind of every section, to name the nearest keys; a valid document imports only what it names.
    """
    return ValueError("\n".join(unknown_keys(document, root) + wrong_values(error, document, root)))


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
                kinds, named, arguments = open_kinds(annotation), entry.get("class"), entry.get("args")
                if kinds is None or entry.get("kind") != IMPORT or not isinstance(arguments, dict):
                    continue
                if isinstance(named, str) and CLASS_PATH.fullmatch(named):
                    with suppress(ValueError):  # reported when the value itself is validated
                        own = kinds.imported(named)
                        if issubclass(own, Section):  # its fields are the known keys
                            yield from _unknown(arguments, own, root, (own,), (*place, "args"))


def _hint(key: str, section: type[Section], root: type[Section], siblings: tuple[type[Section], ...], path: Path) -> str:
    """The hint for an unknown key.

    For a class of the user's own, where its fields go; else the kinds that have the key, and for an argument of TRL the key in its
    place; else the keys of the section that start with it (``clip_low`` and ``clip_high`` for ``clip``) or the nearest one, and the
    other places where the key is known; else the keys that are known here.
    """
    if _kinds(section) == (IMPORT,) and "args" in keys_of(section):
        return f"; the fields of your class go into {dotted((*path, 'args'))}"
    of_trl = f"; {hint}" if (hint := other_names.hint(key)) else ""
    if others := [kind for sibling in siblings if key in keys_of(sibling) for kind in _kinds(sibling)]:
        own = f"this is {' or '.join(map(repr, _kinds(section)))}" if _kinds(section) else "this has no kind"
        return f"; only {' or '.join(map(repr, others))} has it, and {own}{of_trl}"
    if of_trl:
        return of_trl
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
        case "union_tag_not_found" | "union_tag_invalid" as mistake:
            tag = context["discriminator"].strip("'")
            where = dotted((*path, "kind" if tag.endswith("()") else tag))
            if mistake == "union_tag_invalid":
                given, options = context["tag"], context["expected_tags"]
                return f"{where}: {given!r} is not one of {options}{_meant(given, options)}"
            field = field_at(root, document, path)
            sections = alternatives(annotation_of(field)) if field is not None else ()
            kinds = ", ".join(repr(kind) for section in sections for kind in _kinds(section))
            return f"{where}: missing: one of {kinds}"
        case "literal_error":
            return f"{dotted(path)}: {given!r} is not {context['expected']}{_meant(given, context['expected'])}"
        case "string_pattern_mismatch":
            if context["pattern"] == f"^{CLASS_PATH.pattern}$":
                return f"{dotted(path)}: {given!r} is not the path of a class; write package.module:Class, with a colon"
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


_TAGS = ("kind", "mode")


def keys_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The keys of the section, with the names that a recipe uses."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def kinds_of(section: type[Section]) -> tuple[str, tuple[str, ...]] | None:
    """The key that distinguishes the section from its alternatives, and the values of this section: ("kind", ("lora",)). None
    without such a key."""
    for tag in _TAGS:
        annotation = section.model_fields[tag].annotation if tag in section.model_fields else None
        if get_origin(annotation) is Literal:
            return tag, get_args(annotation)
    return None


def annotation_of(field: FieldInfo) -> Any:
    """The field's annotation, with the open set of kinds, which pydantic stores separately as metadata."""
    kinds = [entry for entry in field.metadata if isinstance(entry, Kinds)]
    return Annotated[field.annotation, kinds[0]] if kinds else field.annotation


def open_kinds(annotation: Any) -> Kinds | None:
    """The open set of kinds in an annotation: of the value itself, of an optional value, or of the entries of a list or map."""
    if get_origin(annotation) is Annotated:
        for entry in annotation.__metadata__:
            if isinstance(entry, Kinds):
                return entry
    return next((found for argument in get_args(annotation) if (found := open_kinds(argument)) is not None), None)


def alternatives(annotation: Any) -> tuple[type[Section], ...]:
    """The sections that a field may hold, alone or as entries of its list. Imports all classes of an open set."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    if (kinds := open_kinds(annotation)) is not None:
        return kinds.classes()
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    return tuple(section for argument in get_args(annotation) for section in alternatives(argument))


def section_for(annotation: Any, value: Mapping[str, Any]) -> type[Section] | None:
    """The section class of this value; None if its kind is missing or unknown."""
    if (open_set := open_kinds(annotation)) is not None:
        return open_set.class_for(value)
    sections = alternatives(annotation)
    if len(sections) == 1:
        return sections[0]
    for section in sections:
        match kinds_of(section):
            case (tag, kinds) if value.get(tag) in kinds:
                return section
    untagged = [section for section in sections if kinds_of(section) is None]
    return untagged[0] if len(untagged) == 1 and not any(tag in value for tag in _TAGS) else None


def field_at(root: type[Section], document: Any, path: tuple[str | int, ...]) -> FieldInfo | None:
    """The field at ``path``, following the kinds that the document chose; the last part need not be in the document.

    The field of an entry of a list or map is the field of that list or map.
    """
    section: type[Section] | None = root
    node, field, named = document, None, False
    for part in path:
        if isinstance(part, str) and not named:
            field = keys_of(section).get(part) if section is not None else None
        if field is None:
            return None
        if isinstance(node, dict):
            node = node.get(part)
        else:
            known = isinstance(node, list) and isinstance(part, int) and part < len(node)  # False for a list that is too short
            node = node[part] if known else None
        named = not named and is_map(annotation_of(field))
        section = section_for(annotation_of(field), node) if isinstance(node, dict) and not named else None
    return field


@cache
def places(root: type[Section]) -> dict[str, tuple[str, ...]]:
    """Every key of the schema, and the dotted paths at which it is known. Entries of lists and maps are left out, because they
    repeat other sections, and so are paths that end with another path (``watch.judge.reward.combine`` ends with
    ``reward.combine``). The shortest are first."""
    found: dict[str, list[str]] = {}
    for path in _paths(root, ""):
        known = found.setdefault(path.rpartition(".")[2], [])
        if path not in known:
            known.append(path)
    return {
        key: tuple(
            path
            for path in sorted(paths, key=lambda path: path.count("."))
            if not any(path.endswith(f".{other}") for other in paths if "." in other)
        )
        for key, paths in found.items()
    }


def _paths(section: type[Section], prefix: str) -> Iterator[str]:
    for key, field in keys_of(section).items():
        yield prefix + key
        annotation = annotation_of(field)
        for inner in () if is_list(annotation) or is_map(annotation) else alternatives(annotation):
            yield from _paths(inner, f"{prefix}{key}.")


def is_list(annotation: Any) -> bool:
    """Whether a field contains a list of sections."""
    return get_origin(annotation) is tuple or any(is_list(argument) for argument in get_args(annotation))


def is_text_list(annotation: Any) -> bool:
    """Whether a field contains a list of texts of any length."""
    if get_origin(annotation) is tuple:
        entry, *rest = get_args(annotation)
        entry = get_args(entry)[0] if get_origin(entry) is Annotated else entry
        of_texts = get_origin(entry) is Literal and all(isinstance(each, str) for each in get_args(entry))
        return rest == [...] and (entry is str or of_texts)
    return any(is_text_list(argument) for argument in get_args(annotation))


def is_map(annotation: Any) -> bool:
    """Whether a field contains a map of sections, under names that the user chooses."""
    if get_origin(annotation) is Annotated:
        return is_map(get_args(annotation)[0])
    return get_origin(annotation) is dict and bool(alternatives(annotation))
