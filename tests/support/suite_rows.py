"""Small data for every suite in its published schema: two items that can be used, and rows that cannot be used."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from PIL import Image

from canned_judge import numbered_image, save_numbered_image
from pictures import encoded

DPG_COLUMNS = [
    *("item_id", "text", "keywords", "proposition_id", "dependency", "category_broad", "category_detailed", "tuple"),
    "question_natural_language",
]


def stored(number: int) -> dict[str, Any]:
    """Return an image as parquet files of the Hub store it."""
    return {"bytes": encoded(numbered_image(number)), "path": f"{number}.png"}


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the rows as a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list([dict(row) for row in rows]).to_parquet(path)
    return path


def lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write each row as a line: a text unchanged, anything else as JSON."""
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows))
    return path


def table(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    """Write the rows as a CSV file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def dpg_row(item: str, number: Any, parents: str, kind: str, question: str) -> list[Any]:
    """Return the row of a question of DPG-Bench."""
    return [item, f"prompt of {item}", "k", number, parents, kind, "x", f"{kind} - whole (thing)", question]


def unigen_file(path: Path, rows: Sequence[tuple[int, str, Mapping[str, str]]]) -> Path:
    """Write prompts of UniGenBench with their test points."""
    listed = [["index", "prompt_en", "sub_dims_en"]]
    for index, prompt, points in rows:
        named = {"Testpoints": list(points), "Testpoint Description": list(points.values())}
        listed.append([str(index), prompt, json.dumps({"Primary Categories": "Art", **named})])
    return table(path, listed)


def gedit(root: Path) -> Path:
    row = {
        "task_type": "color_alter",
        "key": "a",
        "instruction": "make it red",
        "instruction_language": "en",
        "input_image": stored(90),
        "input_image_raw": stored(1),
        "Intersection_exist": True,
    }
    return parquet(
        root / "gedit.parquet", [row, {**row, "key": "b", "task_type": "text_change"}, {**row, "key": "c", "instruction": " "}]
    )


def imgedit(root: Path) -> Path:
    rows = {
        "1": {"id": "a/1.png", "prompt": "add a hat", "edit_type": "add"},
        "2": {"id": "a/2.png", "prompt": "as a woodcut", "edit_type": "style"},
        "3": {"id": "a/1.png", "prompt": "melt it", "edit_type": "melt"},
    }
    return _listed(root, "basic_edit.json", rows, images=("a/1.png", "a/2.png"))


def imgedit_uge(root: Path) -> Path:
    rows = {"1": {"id": "1.png", "prompt": "x"}, "2": {"id": "2.png", "prompt": "y"}, "3": {"id": "1.png"}}
    return _listed(root, "UGE_edit.json", {**rows, "4": {"id": "gone.png", "prompt": "z"}}, images=("1.png", "2.png"))


def imgedit_turns(root: Path) -> Path:
    turns = {"turn1": "all green", "turn2": "add fruit"}
    rows = {"1": {"id": "1.png", **turns}, "2": {"id": "2.png", **turns}, "3": {"id": "1.png", "turn1": "alone"}}
    return _listed(root, "content_memory.json", rows, images=("1.png", "2.png"))


def _listed(root: Path, name: str, rows: Any, *, images: Sequence[str]) -> Path:
    for number, image in enumerate(images, 1):
        save_numbered_image(root / "original_images" / image, number)
    (root / name).write_text(json.dumps(rows))
    return root


def turns(root: Path) -> Path:
    save_numbered_image(root / "a.png", 1)
    row = {"file_name": "a.png", "instruction": "red", "later": ["green"]}
    lines(root / "metadata.jsonl", [{"id": "a", **row}, {"id": "b", **row}, {"id": "c", **row, "later": []}])
    return root


def preservation(root: Path) -> Path:
    save_numbered_image(root / "a.png", 1)
    mask = Image.new("L", (8, 8), 0)
    mask.paste(255, (0, 0, 4, 8))
    mask.save(root / "mask.png")
    row = {"file_name": "a.png", "instruction": "x", "mask": "mask.png"}
    lines(root / "metadata.jsonl", [row, {**row, "instruction": "y"}, {"file_name": "a.png", "instruction": "z"}])
    return root


def complex_edit(root: Path) -> Path:
    compound = [{"reasoning": "", "compound_instruction": f"level {level}"} for level in range(1, 9)]
    sequence = [{"name": "ADD", "instruction": f"step {level}"} for level in range(1, 9)]
    edit = {"sequence": sequence, "original_sequence": sequence, "reasoning": "", "compound": compound}
    damaged = {"image": {"bytes": b"no image", "path": "2.png"}, "edit": edit}
    parquet(root / "data" / "test_real-00000-of-00001.parquet", [{"image": stored(1), "edit": edit}, damaged])
    return root


def earl(root: Path) -> Path:
    parquet(root / "aurora.parquet", [{"input": stored(1), "instruction": "a", "source": "ag"}])
    save_numbered_image(root / "magicbrush" / "images" / "242679" / "242679-input.png", 2)
    row = {"input": "242679-input.png", "mask": "m.png", "output": "o.png", "instruction": "m"}
    (root / "magicbrush" / "edit_turns.json").write_text(json.dumps([row, {**row, "input": None}]))
    return root


def kris(root: Path) -> Path:
    row = {"ori_img": "1.png", "gt_img": "", "ins_en": "after a month", "explain_en": "it is mouldy"}
    for category, image in {"biology": "1.png", "color_change": "1.png", "count_change": "gone.png"}.items():
        save_numbered_image(root / category / "1.png", len(category))
        (root / category / "annotation.json").write_text(json.dumps({"1": {**row, "ori_img": image}}))
    return root


def rise(root: Path) -> Path:
    temporal, spatial = {"reference": "it is ripe"}, {"reference": "it stands left"}
    categories = {"temporal_reasoning": temporal, "spatial_reasoning": spatial, "causal_reasoning": {}}
    rows = []
    for number, (category, more) in enumerate(categories.items(), 1):
        index = f"{category}_{number}"
        image = f"{category}_images/{index}.png"
        rows.append({"index": index, "category": category, "subtask": "x", "instruction": "edit", "image": image, **more})
        save_numbered_image(root / "data" / image, number)
    (root / "datav2_total_w_subtask.json").write_text(json.dumps(rows))
    return root


def geneval(root: Path) -> Path:
    cow = [{"class": "cow", "count": 1}]
    rows = [
        {"tag": "single_object", "include": cow, "prompt": "a photo of a cow"},
        {"tag": "counting", "include": cow, "exclude": [{"class": "cow", "count": 2}], "prompt": "a photo of one cow"},
        {"tag": "painting", "include": cow, "prompt": "a painted cow"},
    ]
    return lines(root / "evaluation_metadata.jsonl", rows)


def negation(root: Path) -> Path:
    """A cow, a cow that is not red, and an entry that negates nothing."""
    rows = [
        {"include": [{"class": "cow", "color": "red"}], "exclude": [{"class": "dog", "count": 1}], "prompt": "a red cow, no dog"},
        {"include": [{"class": "cow", "color": "red", "negated": True}], "prompt": "a cow that is not red"},
        {"include": [{"class": "cow", "negated": True}], "prompt": "not a cow"},
    ]
    return lines(root / "negated.jsonl", rows)


def geneval2(root: Path) -> Path:
    row = {"prompt": "four bicycles", "atom_count": 2, "vqa_list": [["How many bicycles are there?", "four"]], "skills": ["count"]}
    rows = [row, {**row, "prompt": "two cats"}, {**row, "prompt": "c", "atom_count": "three"}]
    return lines(root / "geneval2_data.jsonl", rows)


def dpg(root: Path) -> Path:
    rows = [
        dpg_row("1", 1, "0", "entity", "Is there a cat?"),
        dpg_row("2", 1, "0", "entity", "Is there a dog?"),
        dpg_row("3", 1, "7", "entity", "Is there a bird?"),
    ]
    return table(root / "dpg_bench.csv", [DPG_COLUMNS, *rows])


def unigenbench(root: Path) -> Path:
    rows = [
        (0, "two pandas", {"Style": "ink", "Attribute - Quantity": "two", "Attribute - Color": "black"}),
        (1, "a cat", {"Attribute - Size": "small"}),
        (2, "a dog", {"Smell": "wet"}),
    ]
    return unigen_file(root / "test_prompts_en.csv", rows)


def ocr(root: Path) -> Path:
    return lines(root / "test.txt", ['A sign that reads "Open"', 'A cup with "tea"', "no text"])


def longtext(root: Path) -> Path:
    row = {"prompt_id": 0, "prompt": "a poster", "category": "poster", "length": "short", "text": ["Big sale", "today only"]}
    rows = [row, {**row, "prompt_id": 1, "text": ["Stop!"], "category": "sign"}, {**row, "prompt_id": 2, "text": []}]
    return lines(root / "text_prompts.jsonl", rows)


def prompts(root: Path) -> Path:
    rows = [["Prompts", "Category"], ["A red car, parked", "Colors"], ["Two cats", "Counting"], ["", "Counting"]]
    return table(root / "drawbench.csv", rows)
