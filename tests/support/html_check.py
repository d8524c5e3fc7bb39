"""Parses an HTML page strictly: every element must be closed inside its parent, and the page must not load anything."""

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "img", "meta"}
FETCHING = {"link", "iframe", "object", "embed", "video", "audio", "source", "base", "form", "use", "image", "a"}


@dataclass
class Page:
    """The elements of a page with their attributes, and its texts."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: dict[str, list[str]] = field(default_factory=dict)  # by the name of the element that contains the text

    def all(self, name: str, class_: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for element, attributes in self.elements
            if element == name and (not class_ or class_ in (attributes.get("class") or "").split())
        ]

    @property
    def words(self) -> str:
        return " ".join(
            " ".join(part.split()) for name, parts in self.text.items() if name not in ("style", "script") for part in parts
        )


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page, self.open = Page(), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.page.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> outside of SVG"
        self.page.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start tag"
        assert self.open[-1] == tag, f"</{tag}> inside <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            assert self.open, f"text outside of the page: {data!r}"
            self.page.text.setdefault(self.open[-1], []).append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")


def read(content: str) -> Page:
    """Parse the page. Raises AssertionError if an element is not closed inside its parent."""
    reader = _Reader()
    reader.feed(content)
    reader.close()
    assert reader.open == [], f"never closed: {reader.open}"
    return reader.page


def assert_self_contained(page: Page) -> None:
    """Check that no element loads, links to or runs anything outside the page."""
    for name, attributes in page.elements:
        assert name not in FETCHING, name
        for key, value in attributes.items():
            assert not key.startswith("on"), f"<{name} {key}>"
            if key in ("src", "href", "srcset", "action", "poster", "data", "background"):
                assert name == "img", (name, key)
                assert key == "src", (name, key)
                assert (value or "").startswith(("data:image/png;base64,", "data:image/jpeg;base64,")), (value or "")[:60]
    assert len(page.all("script")) == 1
    assert all("url(" not in css and "@import" not in css for css in page.text["style"])
