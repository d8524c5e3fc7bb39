"""Folders of images with metadata, and prompt lists, read into tasks; a link does not lead out of them."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from retouch.cli.parser import main
from retouch.data.base import DataContext, DataSource
from retouch.data.kinds import check, read_path
from retouch.data.rows import quoted
from retouch.data.sources.folder import FolderData, PromptData, path_under, read_folder, read_instructions, read_prompts
from retouch.data.sources.hub import HubData
from retouch.data.sources.stream import StreamData
from retouch.data.tasks import Tasks
from retouch.recipe.recipe import load
from retouch_models.image_tokens import TokenData
from retouch_models.triplets import TripletData


def write(folder, rows, name="metadata.jsonl"):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder


def picture(path, size=(8, 6), colour="red", mode="RGB"):
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    picture(folder / "images/a.png", colour="red")
    picture(folder / "images/b.png", colour="green")
    picture(folder / "out/a.png", colour="blue")
    picture(folder / "mask.png", mode="L", colour=255)
    picture(folder / "ref.png", size=(3, 2), colour="white")
    return write(
        folder,
        [
            {
                "file_name": "images/a.png", "instruction": "make it blue", "target": "out/a.png", "mask": "mask.png",
                "reference": "ref.png", "text": "OPEN", "id": 17, "complexity": 2, "requirement": {"keep": ["sky"]},
            },
            {"file_name": "images/b.png", "instruction": "naïve “quotes” \u2028 inside", "complexity": "3"},
        ],
    )  # fmt: skip


def test_every_field_reaches_the_task(photos):
    first, second = Tasks(read_folder(photos, tag_keys=("complexity",)), resize=None)
    assert (first.id, first.instruction, first.text) == ("17", "make it blue", "OPEN")
    assert [image.getpixel((0, 0)) for image in (*first.images, first.target, first.reference)] == [
        (255, 0, 0), (0, 0, 255), (255, 255, 255),
    ]  # fmt: skip
    assert (first.mask.mode, first.mask.size, first.reference.size) == ("L", (8, 6), (3, 2))
    assert (dict(first.tags), dict(first.meta)) == ({"complexity": "2"}, {"complexity": 2, "requirement": {"keep": ["sky"]}})
    assert (second.id, second.instruction) == ("photos/2", "naïve “quotes” \u2028 inside")
    assert (second.mask, second.target, second.reference, second.text) == (None, None, None, None)


def test_rows_of_one_image_or_prompt_have_one_source(photos, tmp_path):
    image = {"file_name": "images/a.png"}
    named = {"file_name": "images/b.png", "instruction": "make it blue", "source": "scene 7"}
    write(photos, [{**image, "instruction": "make it blue"}, {**image, "instruction": "make it red"}, named])
    assert [task.source for task in Tasks(read_folder(photos), resize=None)] == ["images/a.png", "images/a.png", "scene 7"]
    (tmp_path / "a.txt").write_text("a cat\na dog\na cat\n")
    rows = read_prompts(tmp_path / "a.txt", name="animals")
    assert rows[0].source == rows[2].source != rows[1].source
    assert rows[2].id == "animals/3"


def test_csv_metadata_gives_the_same_task_as_jsonl(photos, tmp_path):
    rows = Tasks(read_folder(photos), resize=None)
    (photos / "metadata.csv").write_bytes(
        b"\xef\xbb\xbffile_name,instruction,target,mask,reference,text,id\r\n"
        b"images/a.png,make it blue,out/a.png,mask.png,ref.png,OPEN,17\r\n"
        b'images/b.png,"two\r\nlines",,,,,\r\n'
    )
    (photos / "metadata.jsonl").unlink()
    first, second = Tasks(read_folder(photos), resize=None)
    assert (first.id, first.instruction, first.text) == (rows[0].id, rows[0].instruction, rows[0].text)
    assert np.array_equal(np.asarray(first.target), np.asarray(rows[0].target))
    assert (second.id, second.instruction, second.mask) == ("photos/3", "two\r\nlines", None)


def test_images_are_loaded_on_access_and_the_last_tasks_are_cached(photos):
    tasks = Tasks(read_folder(photos), resize=None, cache=1)
    (photos / "images/b.png").unlink()
    first = tasks[0]
    assert tasks[-2] is first
    with pytest.raises(ValueError, match=r"metadata\.jsonl:2: .*b\.png.*no such file"):
        tasks[1]
    assert tasks[0] is first  # a failed load is not cached and evicts nothing from the cache
    with pytest.raises(IndexError):
        tasks[2]


def test_images_mask_and_target_of_a_task_are_resized(photos):
    picture(photos / "more.png", size=(9, 3))
    write(photos, [{"file_names": ["images/a.png", "more.png"], "instruction": "x", "mask": "mask.png", "target": "more.png"}])
    task = Tasks(read_folder(photos), resize=(4, 6))[0]
    assert {image.size for image in (*task.images, task.mask, task.target)} == {(4, 6)}


def test_columns_map_other_key_names_to_fields_and_unknown_or_ambiguous_names_raise(photos):
    write(photos, [{"src": "images/a.png", "words": ["first", "second"], "info": {"cut": [{"out": "out/a.png"}]}}])
    columns = {"image": "src", "instruction": "words", "target": "info.cut.0.out"}
    task = Tasks(read_folder(photos, columns=columns), resize=None)[0]
    assert (task.instruction, task.target.getpixel((0, 0))) == ("first", (0, 0, 255))
    assert task.meta == {"info": {"cut": [{"out": "out/a.png"}]}}
    with pytest.raises(ValueError, match="'instrution' is not a field; 'instruction' is"):
        read_folder(photos, columns={"instrution": "words"})
    with pytest.raises(ValueError, match=r"'target' should be read from 'after', but .* has only src, words, info"):
        read_folder(photos, columns={**columns, "target": "after"})
    write(photos, [{"file_name": "images/a.png", "instruction": "x", "prompt": "y"}])
    with pytest.raises(ValueError, match="both 'instruction' and 'prompt' could be the field 'instruction'; say which in columns"):
        read_folder(photos)
    assert read_folder(photos, columns={"instruction": "prompt"})[0].instruction == "y"


def test_folders_without_usable_metadata_raise(tmp_path, photos):
    (photos / "metadata.csv").write_text("file_name\n")
    for folder, message in (
        (tmp_path / "none", "no such folder"), (tmp_path, "no metadata found"),
        (photos, r"metadata\.jsonl and metadata\.csv found; one of"),
        (write(tmp_path / "words", [{"instruction": "x"}]), "no row has a file_name, a target or a chosen image"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_folder(folder)
    (photos / "metadata.jsonl").unlink()
    for content, message in (
        ("file_name\n", "no rows"), ("file_name,file_name\na,b\n", "empty or repeated names"),
        ("file_name;instruction\na.png;b, c\n", r"metadata\.csv:1: the columns are separated by ';'; separate them by commas"),
    ):  # fmt: skip
        (photos / "metadata.csv").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_folder(photos)


ESCAPES = [
    "../secret.png", "images/../../secret.png", "images/../images/a.png", "..", "/etc/passwd", "//etc/passwd", "C:\\secret.png",
    "C:secret.png", "..\\secret.png", "images\\a.png", "\\\\host\\share\\a.png", "link.png", "linked/secret.png",
    "images/a.png\0.jpg", "file:///etc/passwd", "https://example.com/a.png", "~/secret.png", "images", "images/a.png/b.png", "loop",
    "x" * 5000, "",
]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES, ids=range(len(ESCAPES)))
def test_unsafe_or_invalid_file_names_raise(photos, tmp_path, name):
    picture(tmp_path / "secret.png")
    (photos / "link.png").symlink_to(tmp_path / "secret.png")
    (photos / "linked").symlink_to(tmp_path)
    (photos / "loop").symlink_to(photos / "loop")
    write(photos, [{"file_name": name, "instruction": "x"}])
    with pytest.raises(ValueError, match=r"metadata\.jsonl:1: error: 'file_name': "):
        read_folder(photos)[0]
    if name:
        with pytest.raises(ValueError):  # noqa: PT011 (which message depends on the name)
            path_under(photos, name)


def test_prompt_lists_are_read_by_the_endings_of_their_file_types(tmp_path):
    path = tmp_path / "signs.txt"
    path.write_bytes(
        b'\xef\xbb\xbfA shop sign, "OPEN" and "SHUT"\r\n\r\n  a cat \r\nan \xe2\x80\x9codd\xe2\x80\x9d one\x0bwith a tab'
    )
    tasks = Tasks(read_prompts(path), resize=None)
    assert [(task.id, task.instruction, task.text) for task in tasks] == [
        ("signs/1", 'A shop sign, "OPEN" and "SHUT"', "OPEN"), ("signs/3", "a cat", None),
        ("signs/4", "an “odd” one\x0bwith a tab", "odd"),
    ]  # fmt: skip
    assert tasks[0].images == ()
    for name, content in (("a.txt", "a cat\n"), ("a.csv", "prompt\na cat\n"), ("metadata.jsonl", '{"prompt": "a cat"}\n')):
        (tmp_path / name).write_text(content)
        assert [row.instruction for row in read_path(tmp_path / name)] == ["a cat"]
    path.write_text("\n \n")
    for name, message in (
        ("prompts.yaml", r"is read from \.jsonl, \.csv and \.txt"), ("prompts.txt", "no such file"), ("signs.txt", "no rows"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / name)


ROWS = '{"input_image": "a.png", "edit_instruction": "make it red", "difficulty": 1}'
NO_PROMPTS = (
    "no column with the prompts; it has input_image, edit_instruction, difficulty. Call it `prompt` or `instruction`, or name it"
)
SET = "--set data.columns.instruction=edit_instruction"
MISTAKES = [
    ("data/metadata.jsonl", ROWS, ["data"], f"{NO_PROMPTS}: columns={{'instruction': 'edit_instruction'}}, in a recipe {SET}"),
    ("data.jsonl", ROWS, ["data.jsonl"], NO_PROMPTS),
    ("data/metadata.jsonl", ROWS, ["data", *SET.split()], "name the column of the images, columns={'image': '...'}"),
    (
        "data/metadata.jsonl",
        ROWS,
        ["data", "--set", "data.columns.instruktion=x"],
        "'instruktion' is not a field; 'instruction' is",
    ),
    ("data/metadata.jsonl", ROWS, ["data", "--set", "data.column.a=x"], "FolderData: column: unknown key; did you mean columns?"),
    (
        "data/metadata.jsonl",
        ROWS,
        ["data", "--set", "seed=1"],
        "--set: here only keys of data, such as data.columns.instruction=NAME",
    ),
    (
        "data/train.jsonl",
        ROWS,
        ["data"],
        "one of metadata.jsonl and metadata.csv must be there; rename train.jsonl to metadata.jsonl",
    ),
    ("data/train.csv", "a,b\n1,2", ["data"], "must be there; rename train.csv to metadata.csv"),
]


@pytest.mark.parametrize(("file", "rows", "words", "said"), MISTAKES)
def test_mistakes_in_a_data_set_are_reported_with_what_to_write(tmp_path, monkeypatch, capsys, file, rows, words, said):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    picture(tmp_path / "data" / "a.png")
    Path(file).write_text(rows)
    assert main(["data", "check", *words]) == 2
    assert said in capsys.readouterr().err
    if said.endswith(SET):  # what the message says works
        assert main(["data", "check", *words, *SET.split(), "--set", "data.columns.image=input_image"]) == 0


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


QUOTATIONS = {  # None: without a certain quotation, a reward that needs a text refuses the row
    'say "hi"': "hi", '"a" or "b"': "a", 'an open " quote': None, 'nothing ""': None, '" "': None, '" x ""': "x",
    "The text is 'AZIR'.": "AZIR", 'a 5" tablet that shows "HELLO"': "HELLO", 'a 12" pizza on a table': None,
    'a 5" x 7" photo of "ME"': "ME", "a 5” tablet that shows “HELLO”": "HELLO", 'a 6\'2" man who holds a "FREE" sign': "FREE",
    'a sign that says "ROUTE 66"': "ROUTE 66", 'a 12" board with "ROUTE 66" and "ROUTE 67"': "ROUTE 66",
    '"A 5" TABLET" on a box': None, 'a board 5\' 10"" long': None, "a sign that says “OPEN”": "OPEN",
    '“OPEN" in mixed marks': "OPEN", "“OPEN without an end": None, "”OPEN” på en skylt": "OPEN",
    "ein Schild mit „Bäckerei“": "Bäckerei", "une affiche « OUVERT »": "OUVERT", "auf dem Schild steht »Offen«": "Offen",
    "看板に「営業中」と書いてある": "営業中", '写着"营业中"的牌子': "营业中", "「『a』b」": "『a』b",
    "don't forget the word “AZIR”": "AZIR",
    "a sign that doesn't say anything, don't you think": None, "the dogs' bowl and the cats' toys": None, "'the dogs' bowl'": None,
    "‘don’t walk’": "don’t walk", "the '90s poster that says 'HELLO'": "HELLO", "rock 'n' roll on \"LIVE\"": "LIVE",
    "\"say 'OPEN' now\"": "say 'OPEN' now", "“He said ‘hi’ to me”": "He said ‘hi’ to me", "“He said “hi” to me”": None,
    "'He said \"hi\"'": None, '\\"HELLO\\" on a wall': "HELLO", 'a wall with ""HELLO"" on it': "HELLO", "''HELLO''": "HELLO",
}  # fmt: skip


@pytest.mark.parametrize("prompt", QUOTATIONS)
def test_point_1_7_the_text_to_show_is_the_whole_first_quotation_or_none(prompt):
    from retouch_serve import requests as single_score

    assert quoted(prompt) == single_score.quoted_text(prompt) == QUOTATIONS[prompt]


SECRET = "aws_secret_access_key"


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The current folder, unpacked from an archive; its links lead to files of the user next to it."""
    private, given = tmp_path / "private", tmp_path / "given"
    for folder in (private, given, given / "data", given / "features/list"):
        folder.mkdir(parents=True, exist_ok=True)
    (private / "credentials").write_text(f"{SECRET} = 1\n{SECRET} = 2\n")
    (private / "notes.txt").write_text(f"{SECRET}\n")
    (private / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{SECRET} {n}"}) + "\n" for n in range(9)))
    (private / "rows.csv").write_text(f"prompt\n{SECRET}\n")
    datasets.Dataset.from_dict({"prompt": [SECRET] * 9}).to_parquet(private / "rows.parquet")
    monkeypatch.chdir(given)
    return given


def link(place, target):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).symlink_to(target)
    return place


PROMPT = {"instruction": "prompt"}
PROMPTS, PROMPTS_2 = "../private/credentials", "../../private/credentials"
ROWS, ROWS_2 = "../private/rows", "../../private/rows"


def folder_of(place, target):
    """The folder of a link."""
    return str(Path(link(place, target)).parent)


def blobs_of_a_snapshot():
    link("x/blobs", "../../private")
    return PromptData(path=link("x/snapshots/1/prompts.txt", "../../blobs/credentials"))


LINKS = {
    "prompts": lambda: PromptData(path=link("prompts.txt", PROMPTS)),
    "prompts by an absolute name": lambda: PromptData(path=str(Path(link("prompts.txt", PROMPTS)).absolute())),
    "rows": lambda: PromptData(path=link("rows.jsonl", f"{ROWS}.jsonl")),
    "table": lambda: PromptData(path=link("rows.csv", f"{ROWS}.csv")),
    "a link to a link": lambda: PromptData(path=link("prompts.txt", link("data/b.txt", PROMPTS_2))),
    "a folder on the way": lambda: PromptData(path=link("linked", "../private") + "/notes.txt"),
    "the blobs of a snapshot": blobs_of_a_snapshot,
    "metadata of a folder": lambda: FolderData(path=folder_of("data/metadata.jsonl", f"{ROWS_2}.jsonl")),
    "list of triplets": lambda: TripletData(path=folder_of("data/self_bench.txt", PROMPTS_2), allow_test_sets=True),
    "list of tokens": lambda: TokenData(lists=(link("features/list/tokenized_datalist.json", f"../{PROMPTS_2}"),)),
    "parquet file": lambda: HubData(path=link("rows.parquet", f"{ROWS}.parquet"), columns=PROMPT),
    "parquet file in a folder": lambda: HubData(path=folder_of("data/rows.parquet", f"{ROWS_2}.parquet"), columns=PROMPT),
    "folder of tables": lambda: HubData(path=link("tables", "../private"), columns=PROMPT),
    "stream of a file": lambda: StreamData(path=link("rows.jsonl", f"{ROWS}.jsonl"), held_out=1),
    "stream of a pattern": lambda: StreamData(path=folder_of("data/rows.jsonl", f"{ROWS_2}.jsonl") + "/*.jsonl", held_out=1),
    "stream of a folder": lambda: StreamData(path=folder_of("data/a.jsonl", f"{ROWS_2}.jsonl"), held_out=1),
    "stream of a linked folder": lambda: StreamData(path=link("shards", "../private"), held_out=1),
}


@pytest.mark.parametrize("case", LINKS)
@pytest.mark.usefixtures("given")
def test_point_3_7_a_link_out_of_the_data_is_refused_and_its_target_is_not_read(case):
    data: DataSource = LINKS[case]()
    with pytest.raises(ValueError, match=r"leads out of (its|the) folder") as refused:
        data.build(DataContext())
    assert SECRET not in str(refused.value)


@pytest.mark.usefixtures("given")
def test_point_3_7_every_command_refuses_a_linked_prompt_list_by_its_name(capsys):
    link("prompts.txt", "../private/credentials")
    words = ['data={"kind": "prompts", "path": "prompts.txt", "held_out": 1}', "out=runs"]
    recipe = Path("recipe.jsonnet")
    recipe.write_text(load("sd3/ocr-grpo", words).model_dump_json())
    for command in (["train"], ["doctor", "--no-rehearsal"], ["eval"], ["data", "check"]):
        assert main([*command, str(recipe)]) != 0
        said = capsys.readouterr()
        assert "prompts.txt: a link leads out of its folder" in said.out + said.err
        assert SECRET not in said.out + said.err
    assert main(["data", "check", "prompts.txt"]) != 0
    assert "leads out of its folder" in str(check("prompts.txt")[0])
    with pytest.raises(ValueError, match="leads out of its folder"):
        read_instructions("prompts.txt")


def absolute(place, target):
    return Path(link(place, target)).absolute()


HUB = "hub/datasets--a"
ALLOWED = {
    "a link within the current folder": lambda: PromptData(path=link("data/a.txt", "../own.txt")),
    "a list by its real path": lambda: PromptData(path="../private/notes.txt"),
    "a folder that is a link, by its absolute name": lambda: PromptData(path=str(absolute("linked", "../private") / "notes.txt")),
    "a folder of tables by its absolute name": lambda: HubData(path=str(absolute("tables", "../tables")), columns=PROMPT),
    "a snapshot of the Hub's cache": lambda: PromptData(path=str(absolute(f"{HUB}/snapshots/1/p.txt", "../../blobs/1"))),
    "tables in a snapshot": lambda: HubData(
        path=str(absolute(f"{HUB}/snapshots/2/p.parquet", "../../blobs/2").parent), columns=PROMPT
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
@pytest.mark.usefixtures("given")
def test_point_3_7_links_within_the_data_and_folders_that_the_user_names_are_read(case):
    Path(f"{HUB}/blobs").mkdir(parents=True)
    Path("../tables").mkdir()
    for file in ("own.txt", f"{HUB}/blobs/1"):
        Path(file).write_text("a cat\na dog\n")
    for file in (f"{HUB}/blobs/2", "../tables/a.parquet"):
        datasets.Dataset.from_dict({"prompt": ["a", "b"]}).to_parquet(file)
    assert len(ALLOWED[case]().rows(seed=0)) > 0


def test_point_3_7_the_user_can_allow_the_folder_of_a_link(given, monkeypatch):
    monkeypatch.setenv("RETOUCH_DATA_ROOTS", f"/nowhere:{given.parent / 'private'}")
    assert len(LINKS["rows"]().rows(seed=0)) == 9
    assert len(LINKS["folder of tables"]().rows(seed=0)) > 0
