"""HTML that is safe by construction: text is escaped unless it is ``Html``, and only ``tag`` and ``join`` create ``Html``."""

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

VOID = frozenset({"br", "img", "meta", "line", "path", "rect"})


class Html(str):
    """A piece of HTML in which all text is escaped."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[str] | None"
Attribute: TypeAlias = "str | int | float | bool | None"

# HTML forbids these control characters (tab and line ends are allowed); they become the replacement character.
_FORBIDDEN = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "\ufffd")


def text(value: str) -> Html:
    """Escape text. Control characters and unpaired surrogates become the replacement character."""
    whole = value.encode("utf-8", "replace").decode("utf-8")
    return Html(escape(whole.translate(_FORBIDDEN), quote=True))


def join(children: Iterable[Child], between: str = "") -> Html:
    """Concatenate pieces with ``between`` as the separator; text is escaped, and None is left out."""
    return Html(text(between).join(_flat(children)))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Create an element. ``class_`` becomes class and ``data_x`` data-x; True writes a bare attribute, None and False omit it."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        assert not children, f"<{name}> cannot have children"
        return Html(f"<{name}{written}>") if name in ("br", "img", "meta") else Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{text(str(value))}"'


def _flat(children: Iterable[Child]) -> Iterable[str]:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            yield child
        elif isinstance(child, str):
            yield text(child)
        else:
            yield join(child)
