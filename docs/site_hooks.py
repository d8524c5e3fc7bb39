"""Hooks of the documentation site (`mkdocs.yml`): pages that are made of files outside docs/, and anchors as GitHub makes them."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs"
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "src/README.md": "source-tree.md"}
"""Files of the repository that are pages of the site, and their names there."""
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?!https?://|mailto:|#)(?P<path>[^)\s#]+)(?P<anchor>[^)\s]*)\)")
FENCES = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside docs/, and a page with the text of each file outside docs/ that a page links to."""
    linked: set[str] = set()
    for source, target in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        linked |= outside_links(text, PurePosixPath(source).parent)
        alone = "---\nhide: [navigation]\n---\n\n" if target == "index.md" else ""  # its tab has no other page
        files.append(File.generated(config, target, content=alone + rewritten(text, source)))
    for file in files.documentation_pages():
        if file.src_uri not in OUTSIDE.values():
            linked |= outside_links(file.content_string, (DOCS / PurePosixPath(file.src_uri)).parent)
    for path in sorted(linked - set(OUTSIDE)):
        files.append(File.generated(config, f"files/{path}.md", content=file_page(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    if page.file.src_uri in ("results.md", "security.md"):
        page.meta["hide"] = ["toc"]  # their tables are wide
    ready = page.file.src_uri in OUTSIDE.values() or page.file.src_uri.startswith("files/")
    return markdown if ready else rewritten(markdown, f"{DOCS}/{page.file.src_uri}")


def on_page_content(html: str, *, page: Page, config: Any, files: Files) -> str:
    """Short code is not broken, for example after the hyphens of an option. On API pages, the arguments that a paragraph describes
    become a list, and ``Example::`` ends with one colon."""
    html = re.sub(r"<code>([^<\n]{1,26})</code>", r'<code class="short">\1</code>', html)
    if not page.file.src_uri.startswith("api/"):
        return html
    html = re.sub(r"<p>(.*?)</p>", lambda found: listed(found[1]), html, flags=re.DOTALL)
    return re.sub(r"::(</p>\s*<div class=\"[^\"]*highlight)", r":\1", html)


def listed(paragraph: str) -> str:
    """A paragraph of a docstring; sentences such as "``size``: height and width." become items of a list."""
    name = r"<code[^>]*>[\w*]+</code>(?: \([^()]*\))?"
    start, *items = re.split(rf"(?:^|(?<=[.;:]))\s*(?={name}(?:(?:,| and|, and) {name})*:\s)", paragraph)
    if not items:
        return f"<p>{paragraph}</p>"
    items[-1], raises, end = items[-1].partition("Raises ")
    listing = "".join(f"<li>{item.strip().removesuffix(';')}</li>" for item in items)
    return (f"<p>{start}</p>" if start else "") + f"<ul>{listing}</ul>" + (f"<p>{raises}{end}</p>" if raises else "")


def resolved(link: str, folder: PurePosixPath) -> str:
    """The path of a link's target in the repository."""
    return os.path.normpath(folder / link).replace(os.sep, "/")


def outside_links(text: str, folder: PurePosixPath) -> set[str]:
    """The files outside docs/ that the page links to."""
    paths = {resolved(link["path"], folder) for link in LINK.finditer(FENCES.sub("", text))}
    return {path for path in paths if not path.startswith(f"{DOCS}/") and (ROOT / path).is_file()}


def rewritten(text: str, source: str) -> str:
    """The page with its links as they are in the site; a link that shows the name of a page shows its title instead."""
    folder = PurePosixPath(source).parent
    here = PurePosixPath(OUTSIDE.get(source) or PurePosixPath(source).relative_to(DOCS)).parent

    def link(match: re.Match[str]) -> str:
        path = resolved(match["path"], folder)
        if path.startswith(f"{DOCS}/"):
            target = path.removeprefix(f"{DOCS}/")
        elif path in OUTSIDE or (ROOT / path).is_file():
            target = OUTSIDE.get(path, f"files/{path}.md")
        else:
            return match[0]
        shown = match["text"] if not match["text"].endswith(".md") else title(path)
        return f"[{shown}]({os.path.relpath(target, here).replace(os.sep, '/')}{match['anchor']})"

    return LINK.sub(link, text)


def title(path: str) -> str:
    """The first heading of a page of the repository."""
    return (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def file_page(path: str) -> str:
    """A page with the text of a file of the repository."""
    languages = {".py": "python", ".jsonnet": "jsonnet", ".toml": "toml", ".sh": "sh", ".yaml": "yaml"}
    language = languages.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# `{path}`\n\n````{language}\n{text}\n````\n"
