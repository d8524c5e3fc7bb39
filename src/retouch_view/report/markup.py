"""HTML that is safe by construction, numbers as text, and images inside of a page.

Text is escaped unless it is ``Html``, and only ``tag`` and ``join`` create ``Html``.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from PIL import Image, UnidentifiedImageError

from retouch.records.files import read_bytes

MINUS = "\u2212"
MISSING = "\u2013"
EXACT = 160  # an image whose longest edge has at most this many pixels is embedded unchanged
PIXELATED = 96  # an image whose longest edge has at most this many pixels is displayed without smoothing
LARGE, SMALL = 384, 208  # larger images are reduced to this longest edge in pixels, twice the displayed size
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
    pieces = (child if isinstance(child, str) else join(child) for child in children if child is not None)
    return Html(text(between).join(piece if isinstance(piece, Html) else text(piece) for piece in pieces))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Create an element. ``class_`` becomes class and ``data_x`` data-x; True writes a bare attribute, None and False omit it."""
    written = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            bare = f" {key.rstrip('_').replace('_', '-')}"
            written += bare if value is True else f'{bare}="{text(str(value))}"'
    if name in VOID:
        assert not children, f"<{name}> cannot have children"
        return Html(f"<{name}{written}>") if name in ("br", "img", "meta") else Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def format_number(value: float | int | None) -> str:
    """Format with at most two decimals or, below 0.1, two significant digits; an exponent only if needed; a dash if missing."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e5:
        digits, _, exponent = f"{value:.1e}".partition("e")
        return _minus(f"{digits.removesuffix('.0')}e{int(exponent)}")
    if isinstance(value, int) or size >= 1000:
        return _minus(f"{value:.0f}")
    return _minus(f"{value:.2f}" if size >= 0.1 else f"{value:.2g}")


def format_brief(value: float) -> str:
    """Format with at most three significant digits and without trailing zeros, for captions."""
    return _minus(f"{value:.3g}")


def decimals_for(values: Iterable[float | None]) -> int:
    """Return how many decimals these scores need: three if no absolute value is above 1, otherwise two."""
    return 3 if all(value is None or not abs(value) > 1 for value in values) else 2


def format_score(value: float | None, decimals: int = 2) -> str:
    """Format with a fixed number of decimals, for tables of scores; a dash if the value is missing."""
    return MISSING if value is None or not math.isfinite(value) else _minus(f"{value:.{decimals}f}")


def format_signed(value: float | None, decimals: int = 2) -> str:
    """Format as ``format_score``, with a sign; a value that rounds to 0 gets no sign."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = f"{value:+.{decimals}f}"
    return rounded.lstrip("+-") if float(rounded) == 0 else _minus(rounded)


def format_percent(share: float) -> str:
    return _minus(f"{100 * share:.0f}") + " %"


def format_duration(seconds: float) -> str:
    """Format a duration in milliseconds, seconds, minutes or hours, depending on its length."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table. Numbers are right-aligned, except in the first column."""
    columns = range(max(map(len, rows)))
    widths = [max((len(row[place]) for row in rows if place < len(row)), default=0) for place in columns]
    return ["  " + "  ".join(_cell(cell, widths[place], place) for place, cell in enumerate(row)).rstrip() for row in rows]


def _minus(written: str) -> str:
    return written.replace("-", MINUS)


def _cell(cell: str, width: int, place: int) -> str:
    numeric = cell.replace(".", "", 1).replace("+", "", 1).replace("-", "", 1).replace(MINUS, "", 1).isdigit()
    return cell.rjust(width) if numeric and place else cell.ljust(width)


def scrolled(head: Html, rows: Child, *, style: str | None = None) -> Html:
    """A table with a head, in a box that scrolls. ``style``: the class of the table."""
    return tag("div", tag("table", tag("thead", head), tag("tbody", rows), class_=style), class_="scroll")


def picture(path: Path | None, *, words: str, edge: int = LARGE) -> Html:
    """Embed the image at ``path``, reduced to ``edge`` pixels if it is large; a box with the reason if there is no image.
    ``words``: the alternative text."""
    reason = "no image"
    try:
        if path is not None:
            return embedded(read_bytes(path), words=words, edge=edge)
    except OSError as error:
        reason = "file not found" if isinstance(error, FileNotFoundError) else "not readable"
    return tag("span", reason, class_="nothing")


def embedded(content: bytes, *, words: str, edge: int = LARGE) -> Html:
    """Embed the image in ``content``, the bytes of an image file, in the same way as ``picture``."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            size, longest = image.size, max(image.size)
            kind, content = ("png", content) if longest <= EXACT and image.format == "PNG" else _encode(image, edge)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return tag("span", "not readable", class_="nothing")
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    style = "pixelated" if longest <= PIXELATED else None
    return tag("img", src=source, alt=words, width=size[0], height=size[1], class_=style, decoding="async")


def _encode(image: Image.Image, edge: int) -> tuple[str, bytes]:
    """Encode a small image as PNG, and a large one reduced as JPEG: 20 photographs as PNG would take tens of megabytes."""
    buffer, reduced = io.BytesIO(), image.convert("RGB")
    if max(image.size) <= EXACT:
        reduced.save(buffer, format="PNG")
        return "png", buffer.getvalue()
    reduced.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    reduced.save(buffer, format="JPEG", quality=88)
    return "jpeg", buffer.getvalue()
