"""The page of a run without a server: in a notebook, and exported to a file."""

import re
from html import unescape
from pathlib import Path

import pytest

import retouch
from retouch import cli
from retouch.view.inline import RunView

HOSTILE = "<b id=planted>bold</b><script>alert(1)</script>\u202e\"'" + "w" * 1_000_000


def test_a_notebook_shows_a_page_in_a_frame(write_run) -> None:
    folder = write_run("one")
    page = retouch.view(folder.root)
    assert isinstance(page, RunView)
    frame = page._repr_html_()
    assert unescape(re.search(r'srcdoc="([^"]*)"', frame)[1]) == page.html  # type: ignore[index]
    assert 'sandbox="allow-scripts"' in frame
    assert "make it red" in page.html
    assert "Before and after" in page.html
    assert "<h2>Recipe</h2>" not in page.html
    assert "<h2>Recipe</h2>" in retouch.view(str(folder.root), everything=True).html
    assert len(repr(page)) < 200


def test_view_accepts_an_object_with_a_folder_attribute(write_run) -> None:
    class Loaded:
        folder = write_run("one").root

    assert retouch.view(Loaded()).html == retouch.view(Loaded.folder).html


def test_export_writes_the_page_and_rejects_a_folder_that_is_no_run(
    write_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run("one")
    file = tmp_path / "new" / "page.html"
    assert cli.main(["view", str(folder.root), "--export", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    assert file.read_text(encoding="utf-8") == retouch.view(folder.root, everything=True).html
    assert cli.main(["view", str(tmp_path), "--export", str(file)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err


def test_hostile_text_is_escaped_in_the_frame(write_run) -> None:
    page = retouch.view(write_run("one", instruction=HOSTILE).root)
    assert "<b id=planted>" not in page.html
    assert page.html.count("<script>") == 1  # the page's own
    assert '"' not in page._repr_html_().partition('srcdoc="')[2].rpartition('"')[0]


def test_folder_that_is_no_run_and_invalid_height_raise(write_run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the folder of a run"):
        retouch.view(tmp_path)
    with pytest.raises(ValueError, match="height 0"):
        retouch.view(write_run("one").root, height=0)
