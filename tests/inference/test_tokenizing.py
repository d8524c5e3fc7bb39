"""`retouch data tokenize` stores images as image tokens: the command, its shards, and runs that train on the stored codes."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

import tiny_writer_runs
from retouch.cli import main
from retouch.distributed.ranks import Ranks
from retouch.recipe.derived_facts import differences
from retouch.recipe.recipe import parse
from retouch.run.build import assemble
from retouch_models.emu3 import DRAW, THINK, load_emu3
from retouch_models.features import read_feature
from retouch_models.tokenizing import Job, merge, read_tasks, tokenize_shard
from retouch_view.ledger import LedgerSample
from retouch_view.rescoring import RunTasks

PLAYGROUND = {"kind": "playground", "complexity": [1, 2], "count": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("emu3")
    tiny_writer_runs.save_emu3(path)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of edits; each row has a thought."""
    root = tmp_path_factory.mktemp("pictures")
    lines = []
    for number, task in enumerate(read_tasks(json.dumps(PLAYGROUND), size=(24, 24))):
        names = [f"{number}.png", f"{number}-edited.png"]
        task.images[0].save(root / names[0])
        task.target.save(root / names[1])
        line = {"file_name": names[0], "target": names[1], "instruction": task.instruction, "thought": f"thing {number}"}
        lines.append({**line, "id": f"{number}/a"})
    (root / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory, folder, pictures):
    out = tmp_path_factory.mktemp("tokens") / "s"
    words = ["--model", str(folder), "--out", str(out), "--size", "24", "24", "--device", "cpu"]
    assert main(["data", "tokenize", str(pictures), *words]) == 0
    return out


def editor(folder, prefill=DRAW):
    return load_emu3(folder, size=(24, 24), prefill=prefill, dtype=torch.float32, device="cpu")


def document(tmp_path, folder, lists, **changes):
    data = {"kind": "tokens", "lists": [str(each) for each in lists], "held_out": 3}
    reward = {"kind": "compressibility", "combine": {"compressibility": 1}}
    settings = {"policy__train": {"kind": "full"}, "reward": reward, "data": data, **changes}
    return tiny_writer_runs.recipe(tmp_path / "runs", folder, **{**tiny_writer_runs.image_tokens(folder), **settings})


def test_stored_codes_equal_the_codes_of_the_model(folder, pictures, made):
    tasks = read_tasks(str(pictures), size=(24, 24))
    names = json.loads((made / "list" / "tokenized_datalist.json").read_text())["path_list"]
    assert names == [f"{number}%2Fa.safetensors" for number in range(12)]
    wanted = editor(folder).encode_codes([task.images[0] for task in tasks])
    for task, name, codes in zip(tasks, names, wanted, strict=True):
        with safe_open(made / "feature" / name, framework="pt") as file:
            assert torch.equal(file.get_tensor("original_image"), codes.int())
            assert file.metadata()["instruction"] == task.instruction


def test_shards_together_equal_the_output_of_one_process(tmp_path, folder, pictures, made):
    job = Job(source=str(pictures), model=str(folder), out=tmp_path / "d", size=(24, 24), device="cpu", batch=3)
    assert [tokenize_shard(job, shard, of=3) for shard in (2, 0)] == [None, None]
    # A file that another job left there does not count as a shard of this job.
    shutil.copy(tmp_path / "d/list/shards/00000-of-00003.json", tmp_path / "d/list/shards/00001-of-00003.json")
    other = json.loads((tmp_path / "d/list/shards/00001-of-00003.json").read_text()) | {"stamp": "another"}
    (tmp_path / "d/list/shards/00001-of-00003.json").write_text(json.dumps(other))
    assert merge(job.out, of=3) is None
    found = tokenize_shard(job, 1, of=3)
    assert found == tmp_path / "d/list/tokenized_datalist.json"
    wanted = json.loads((made / "list/tokenized_datalist.json").read_text())["path_list"]
    assert json.loads(found.read_text()) == {"prefix": str(tmp_path / "d/feature"), "path_list": wanted}
    for name in wanted:
        one, other = (read_feature(root / "feature" / name, trusted=False) for root in (tmp_path / "d", made))
        assert (one.id, one.instruction, one.thought, one.task) == (other.id, other.instruction, other.thought, other.task)
        assert torch.equal(one.source, other.source)
        assert torch.equal(one.target, other.target)
    assert not [file for file in (tmp_path / "d").rglob("*") if file.name.startswith(".") or file.suffix == ".tmp"]
    with pytest.raises(ValueError, match="shards count from 0"):
        tokenize_shard(job, 3, of=3)


@pytest.mark.slow
def test_two_processes_tokenize_the_same_rows_as_one(tmp_path, folder, pictures, made):
    words = ["--model", str(folder), "--out", str(tmp_path / "d"), "--size", "24", "24", "--device", "cpu"]
    assert main(["data", "tokenize", str(pictures), *words, "--processes", "2"]) == 0
    lists = [json.loads((root / "list/tokenized_datalist.json").read_text())["path_list"] for root in (tmp_path / "d", made)]
    assert lists[0] == lists[1]


def test_tasks_with_stored_codes_are_encoded_and_decoded_like_tasks_with_images(folder, pictures, made, tmp_path):
    sets = assemble(parse(document(tmp_path, folder, [made])), Ranks()).sets[0]
    assert (len(sets.train), len(sets.heldout)) == (9, 3)
    task = sets.train[0]
    original = {each.id: each for each in read_tasks(str(pictures), size=(24, 24))}[task.id.removeprefix("s/")]
    for prefill in (DRAW, THINK):
        model = editor(folder, prefill)
        assert torch.equal(model.encode([task]).ids, model.encode([original]).ids)
        assert model.target_ids([task]) == model.target_ids([original])
    assert task.images[0].tobytes() == model.decode_codes(model.encode_codes(original.images))[0].tobytes()
    wrong = original.__class__(id="x", instruction="y", meta={"source_codes": [[0]]})
    with pytest.raises(ValueError, match="tokenize the data again"):
        model.encode([wrong])


def test_images_stored_with_the_tokens_equal_the_originals_and_without_them_tasks_cannot_be_scored_again(
    folder, made, pictures, tmp_path
):
    def scored(task):
        numbers = {"step": 0, "group": 0, "slot": 0, "seconds": 0.0, "at": 0.0, "scores": {}}
        return LedgerSample(split="eval", task=task, image="", completion=None, judge="", **numbers)

    words = ["--model", str(folder), "--out", str(tmp_path / "d"), "--size", "24", "24", "--device", "cpu", "--pictures"]
    section = json.dumps({"kind": "folder", "path": str(pictures)})
    assert main(["data", "tokenize", section, *words]) == 0
    recipe, without = (parse(document(tmp_path, folder, [place])) for place in (tmp_path / "d", made))
    sets = assemble(recipe, Ranks()).sets[0]
    task = sets.train[0]
    kept = {each.id: each for each in read_tasks(str(pictures), size=(24, 24))}[task.id.removeprefix("d/")]
    assert task.images[0].tobytes() == kept.images[0].tobytes()
    assert task.target.tobytes() == kept.target.tobytes()
    assert RunTasks(recipe)(scored(sets.heldout[0].id)).images
    with pytest.raises(ValueError, match="retouch data tokenize --pictures"):
        RunTasks(without)(scored(assemble(without, Ranks()).sets[0].heldout[0].id))


def test_a_run_on_tokens_trains_and_is_judged(folder, made, tmp_path):
    gradient = {"kind": "policy_gradient", "surrogate": "reinforce", "kl": {"kind": "k3", "weight": 3e-4}, "normalise": "token"}
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document(tmp_path, folder, [made], objective=gradient, steps=1)))
    assert main(["train", str(file)]) == 0
    (step,) = [json.loads(line) for line in (tmp_path / "runs" / "written" / "metrics.jsonl").read_text().splitlines()]
    assert step["reward/compressibility"] > 0
    assert step["policy/ratio_max_first"] <= 1e-5


def test_validation_items_do_not_train_and_coefficients_mix_the_lists(folder, made, tmp_path):
    half = tmp_path / "half"
    names = json.loads((made / "list/tokenized_datalist.json").read_text())["path_list"]
    (half / "list").mkdir(parents=True)
    shutil.copytree(made / "feature", half / "feature")
    (half / "list/tokenized_datalist.json").write_text(json.dumps({"prefix": "", "path_list": names[:4]}))
    data = {"kind": "tokens", "lists": [str(made), str(half)], "coefficients": [1.5, 2], "validation_lists": [str(half)]}
    recipe = parse(document(tmp_path, folder, [], data=data))
    sets = assemble(recipe, Ranks()).sets[0]
    trained = [sets.train[k].id for k in range(len(sets.train))]
    # The 8 items that are not for validation, 1.5 times; the whole second list is for validation, so none of it trains.
    assert len(trained) == 12
    assert len(set(trained)) == 8
    assert {sets.heldout[k].id.split("/", 1)[1] for k in range(4)} == {f"{k}/a" for k in range(4)}
    assert "share a source image" in str(sets.problems[-1])
    moved = parse(document(tmp_path, folder, [], data={**data, "lists": [str(half), str(made)]}))
    assert differences(recipe, moved) == []
    with pytest.raises(ValueError, match=r"data\.coefficients: 1 for 2 lists"):
        parse(document(tmp_path, folder, [], data={**data, "coefficients": [1]}))


def test_tokens_of_another_size_or_for_another_policy_are_refused(folder, made, tmp_path):
    with pytest.raises(ValueError, match="12 of 12 feature files were made with another"):
        assemble(parse(document(tmp_path, folder, [made], policy__model__size=[16, 16])), Ranks())
    writer = {"model": {"kind": "playground-writer"}, "kind": "autoregressive"}
    drawn = {"kind": "response", "model": {"kind": "playground"}, "encoder": "frozen", "num_steps": 2}
    with pytest.raises(ValueError, match=r"data\.kind: tokens are for a policy that generates image tokens"):
        parse(document(tmp_path, folder, [made], policy=writer, renderer=drawn))


def test_sources_that_cannot_be_tokenized_end_with_an_error_message(folder, tmp_path, capsys):
    words = ["--model", str(folder), "--out", str(tmp_path / "d"), "--device", "cpu"]
    for source, says in (
        (str(tmp_path / "nothing"), "no such file or folder"),
        ('{"kind": "prompts", "path": "x.txt"}', "prompts data cannot be tokenized"),
        ('{"kind": "folder", "pth": "x"}', "did you mean"),
    ):
        assert main(["data", "tokenize", source, *words]) == 2
        assert says in capsys.readouterr().err
