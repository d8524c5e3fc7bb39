"""Links of data files: a recipe from another person must not make a run read, and send to its judge, files outside of the data."""

import json
from pathlib import Path

import datasets
import pytest

from retouch.cli.parser import main
from retouch.data.base import DataContext, DataSource
from retouch.data.kinds import check
from retouch.data.sources.folder import FolderData, PromptData, read_instructions
from retouch.data.sources.hub import HubData
from retouch.data.sources.stream import StreamData
from retouch.data.sources.tokens import TokenData
from retouch.data.sources.triplets import TripletData
from retouch.recipe.recipe import load

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
LINKS = {
    "prompts": lambda: PromptData(path=link("prompts.txt", "../private/credentials")),
    "prompts by an absolute name": lambda: PromptData(path=str(Path(link("prompts.txt", "../private/credentials")).absolute())),
    "rows": lambda: PromptData(path=link("rows.jsonl", "../private/rows.jsonl")),
    "table": lambda: PromptData(path=link("rows.csv", "../private/rows.csv")),
    "a link to a link": lambda: PromptData(path=link("prompts.txt", link("data/b.txt", "../../private/credentials"))),
    "a folder on the way": lambda: PromptData(path=link("linked", "../private") + "/notes.txt"),
    "the blobs of a snapshot": lambda: (
        link("x/blobs", "../../private"),
        PromptData(path=link("x/snapshots/1/prompts.txt", "../../blobs/credentials")),
    )[1],
    "metadata of a folder": lambda: FolderData(path=str(Path(link("data/metadata.jsonl", "../../private/rows.jsonl")).parent)),
    "list of triplets": lambda: TripletData(
        path=str(Path(link("data/self_bench.txt", "../../private/credentials")).parent), allow_test_sets=True
    ),
    "list of tokens": lambda: TokenData(lists=(link("features/list/tokenized_datalist.json", "../../../private/credentials"),)),
    "parquet file": lambda: HubData(path=link("rows.parquet", "../private/rows.parquet"), columns=PROMPT),
    "parquet file in a folder": lambda: HubData(
        path=str(Path(link("data/rows.parquet", "../../private/rows.parquet")).parent), columns=PROMPT
    ),
    "folder of tables": lambda: HubData(path=link("tables", "../private"), columns=PROMPT),
    "stream of a file": lambda: StreamData(path=link("rows.jsonl", "../private/rows.jsonl"), held_out=1),
    "stream of a pattern": lambda: StreamData(path=link("data/rows.jsonl", "../../private/rows.jsonl")[:5] + "*.jsonl", held_out=1),
    "stream of a folder": lambda: StreamData(path=str(Path(link("data/a.jsonl", "../../private/rows.jsonl")).parent), held_out=1),
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


ALLOWED = {
    "a link within the current folder": lambda: PromptData(path=link("data/a.txt", "../own.txt")),
    "a list by its real path": lambda: PromptData(path="../private/notes.txt"),
    "a folder that is a link, by its absolute name": lambda: PromptData(
        path=str(Path(link("linked", "../private")).absolute() / "notes.txt")
    ),
    "a folder of tables by its absolute name": lambda: HubData(
        path=str(Path(link("tables", "../tables")).absolute()), columns=PROMPT
    ),
    "a snapshot of the Hub's cache": lambda: PromptData(
        path=str(Path(link("hub/datasets--a/snapshots/1/p.txt", "../../blobs/1")).absolute())
    ),
    "tables in a snapshot": lambda: HubData(
        path=str(Path(link("hub/datasets--a/snapshots/2/p.parquet", "../../blobs/2")).absolute().parent), columns=PROMPT
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_point_3_7_links_within_the_data_and_folders_that_the_user_names_are_read(given, case):
    Path("own.txt").write_text("a cat\na dog\n")
    Path("hub/datasets--a/blobs").mkdir(parents=True)
    Path("hub/datasets--a/blobs/1").write_text("a cat\na dog\n")
    Path("../tables").mkdir()
    for file in ("hub/datasets--a/blobs/2", "../tables/a.parquet"):
        datasets.Dataset.from_dict({"prompt": ["a", "b"]}).to_parquet(file)
    assert len(ALLOWED[case]().rows(seed=0)) > 0


def test_point_3_7_the_user_can_allow_the_folder_of_a_link(given, monkeypatch):
    monkeypatch.setenv("RETOUCH_DATA_ROOTS", f"/nowhere:{given.parent / 'private'}")
    assert len(PromptData(path=link("rows.jsonl", "../private/rows.jsonl")).rows(seed=0)) == 9
    assert len(HubData(path=link("tables", "../private"), columns=PROMPT).rows(seed=0)) > 0
