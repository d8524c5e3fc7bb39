"""Prompt lists, plain and with metadata."""

import os
from pathlib import Path

import pytest

from retouch.data.check import check, read_path
from retouch.data.quotes import quoted
from retouch.data.sources.folder import read_folder
from retouch.data.sources.prompts import read_prompts
from retouch.data.tasks import Tasks


def test_a_plain_prompt_list_is_read(tmp_path):
    path = tmp_path / "signs.txt"
    path.write_bytes(
        b'\xef\xbb\xbfA shop sign, "OPEN" and "SHUT"\r\n\r\n  a cat \r\nan \xe2\x80\x9codd\xe2\x80\x9d one\x0bwith a tab'
    )
    tasks = Tasks(read_prompts(path), resize=None)
    assert [(task.id, task.instruction, task.text) for task in tasks] == [
        ("signs/1", 'A shop sign, "OPEN" and "SHUT"', "OPEN"),
        ("signs/3", "a cat", None),
        ("signs/4", "an “odd” one\x0bwith a tab", "odd"),
    ]
    assert tasks[0].images == ()


def test_a_prompt_list_with_metadata_is_read(tmp_path):
    path = tmp_path / "geneval.jsonl"
    path.write_text(
        '{"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "two cups"}\n'
        '{"tag": "text", "prompt": "the word \\"no\\"", "text": "yes", "id": "x"}\n'
    )
    first, second = Tasks(read_prompts(path, tag_keys=("tag",)), resize=None)
    assert (first.id, first.instruction, dict(first.tags)) == ("geneval/1", "two cups", {"tag": "counting"})
    assert first.meta["include"] == [{"class": "cup", "count": 2}]
    assert (second.id, second.text) == ("x", "yes")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_the_metadata_file_of_an_image_folder_is_not_read_as_a_prompt_list(tmp_path, name):
    csv = name.endswith("csv")
    (tmp_path / name).write_text("file_name,prompt\na.png,red\n" if csv else '{"file_name": "a.png", "prompt": "red"}\n')
    message = "give the folder, not its metadata file"
    for read in (read_prompts, read_folder):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
    (problem,) = check(tmp_path / name)
    assert message in str(problem)


def test_a_prompt_list_is_recognised_by_the_endings_of_its_file_types(tmp_path):
    for name, content in (("a.txt", "a cat\n"), ("a.csv", "prompt\na cat\n"), ("metadata.jsonl", '{"prompt": "a cat"}\n')):
        (tmp_path / name).write_text(content)
        assert [row.instruction for row in read_path(tmp_path / name)] == ["a cat"]


def test_rows_of_one_prompt_have_one_source(tmp_path):
    (tmp_path / "a.txt").write_text("a cat\na dog\na cat\n")
    rows = read_prompts(tmp_path / "a.txt", name="animals")
    assert rows[0].source == rows[2].source != rows[1].source
    assert rows[2].id == "animals/3"


QUOTATIONS = {  # None: without a certain quotation, a reward that needs a text refuses the row
    'say "hi"': "hi",
    '"a" or "b"': "a",
    'an open " quote': None,
    'nothing ""': None,
    '" "': None,
    '" x ""': "x",
    "The text is 'AZIR'.": "AZIR",
    'a 5" tablet that shows "HELLO"': "HELLO",
    'a 12" pizza on a table': None,
    'a 5" x 7" photo of "ME"': "ME",
    "a 5” tablet that shows “HELLO”": "HELLO",
    'a 6\'2" man who holds a "FREE" sign': "FREE",
    'a sign that says "ROUTE 66"': "ROUTE 66",
    'a 12" board with "ROUTE 66" and "ROUTE 67"': "ROUTE 66",
    '"A 5" TABLET" on a box': None,
    'a board 5\' 10"" long': None,
    "a sign that says “OPEN”": "OPEN",
    '“OPEN" in mixed marks': "OPEN",
    "“OPEN without an end": None,
    "”OPEN” på en skylt": "OPEN",
    "ein Schild mit „Bäckerei“": "Bäckerei",
    "une affiche « OUVERT »": "OUVERT",
    "auf dem Schild steht »Offen«": "Offen",
    "看板に「営業中」と書いてある": "営業中",
    '写着"营业中"的牌子': "营业中",
    "「『a』b」": "『a』b",
    "don't forget the word “AZIR”": "AZIR",
    "a sign that doesn't say anything, don't you think": None,
    "the dogs' bowl and the cats' toys": None,
    "'the dogs' bowl'": None,
    "‘don’t walk’": "don’t walk",
    "the '90s poster that says 'HELLO'": "HELLO",
    "rock 'n' roll on \"LIVE\"": "LIVE",
    "\"say 'OPEN' now\"": "say 'OPEN' now",
    "“He said ‘hi’ to me”": "He said ‘hi’ to me",
    "“He said “hi” to me”": None,
    "'He said \"hi\"'": None,
    '\\"HELLO\\" on a wall': "HELLO",
    'a wall with ""HELLO"" on it': "HELLO",
    "''HELLO''": "HELLO",
}


@pytest.mark.parametrize("prompt", QUOTATIONS)
def test_point_1_7_the_text_to_show_is_the_whole_first_quotation_or_none(prompt):
    from retouch_serve.server import request_bodies as single_score

    assert quoted(prompt) == single_score.quoted_text(prompt) == QUOTATIONS[prompt]


def test_invalid_prompt_lists_raise(tmp_path):
    with pytest.raises(ValueError, match=r"is read from \.jsonl, \.csv and \.txt"):
        read_prompts(tmp_path / "prompts.yaml")
    with pytest.raises(ValueError, match="no such file"):
        read_prompts(tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="no rows"):
        read_prompts(tmp_path / "prompts.txt")


def test_flow_grpos_prompt_lists_are_read():
    """The real lists, if RETOUCH_TEST_DATA names the folder that contains them."""
    if "RETOUCH_TEST_DATA" not in os.environ:
        pytest.skip("RETOUCH_TEST_DATA names no folder with prompts/ocr.txt and prompts/geneval.jsonl")
    folder = Path(os.environ["RETOUCH_TEST_DATA"]) / "prompts"
    signs = Tasks(read_prompts(folder / "ocr.txt"), resize=None)
    assert len(signs) == 300
    assert all(task.text and f'"{task.text}' in task.instruction.replace('" ', '"') for task in signs)
    objects = Tasks(read_prompts(folder / "geneval.jsonl", tag_keys=("tag",)), resize=None)
    assert len(objects) == 300
    assert all(task.meta["include"] and task.tags["tag"] for task in objects)
