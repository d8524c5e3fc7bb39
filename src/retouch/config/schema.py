"""The recipe's keys as a tree: the section class of a value, the keys of a section, and all places where a key is known."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from retouch.config.kinds import Kinds
from retouch.config.section import Section

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
    ``reward.combine``)."""
    found: dict[str, list[str]] = {}
    for path in _paths(root, ""):
        known = found.setdefault(path.rpartition(".")[2], [])
        if path not in known:
            known.append(path)
    return {
        key: tuple(path for path in paths if not any(path.endswith(f".{other}") for other in paths if "." in other))
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
        return rest == [...] and (_is_text(entry) or (get_origin(entry) is Annotated and _is_text(get_args(entry)[0])))
    return any(is_text_list(argument) for argument in get_args(annotation))


def _is_text(annotation: Any) -> bool:
    return annotation is str or (get_origin(annotation) is Literal and all(isinstance(each, str) for each in get_args(annotation)))


def is_map(annotation: Any) -> bool:
    """Whether a field contains a map of sections, under names that the user chooses."""
    if get_origin(annotation) is Annotated:
        return is_map(get_args(annotation)[0])
    return get_origin(annotation) is dict and bool(alternatives(annotation))
