"""Emu3 as an image editor: its prompts, images as codes, the format of its completions, and its folders."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_emu3
import tiny_models
import tiny_writing
from retouch.protocols import AutoregressiveModel, DecodesCodes, Grammar
from retouch.renderers.base import CodesDecoder
from retouch.types import Completion, Kind, Needs, Task
from retouch_models.emu3 import BOI, BOS, DRAW, END_OF_THOUGHT, EOF, EOI, EOL, EOS, IMG, THINK, Emu3Editor, load_emu3, save_for_vllm
from retouch_worlds.testing import check_policy
from slow_params import slow_except

# Emu3 as an image editor


def tasks():
    return (
        tiny_models.task("one", "make it red", tiny_models.image(0, 16, 24)),
        tiny_models.task("two", "no", tiny_models.image(1, 32, 32)),
        tiny_models.task("three", "add a blue circle", tiny_models.image(2, 16, 24)),
    )


@pytest.fixture(scope="module")
def editor():
    made = tiny_emu3.editor()
    factor = made.vq.spatial_scale_factor
    assert made.grid == (16 // factor, 24 // factor)
    return made


def names(editor, ids):
    return editor.words.tokenizer.convert_ids_to_tokens(list(ids))


def test_prompt_consists_of_source_image_instruction_and_prefill(editor):
    prompts = editor.encode(tasks())
    height, width = editor.grid
    row = prompts.ids[0][prompts.mask[0]].tolist()
    codes = editor.encode_codes([tasks()[0].images[0]])[0]
    rows = [[f"<|visual token {code:06d}|>" for code in line] + [EOL] for line in codes.tolist()]
    expected = [BOS, BOI, *f"{height}*{width}", IMG, *(each for line in rows for each in line), EOF, EOI]
    assert names(editor, row[: len(expected)]) == expected
    assert editor.words.tokenizer.decode(row[len(expected) :]) == "make it red" + DRAW
    assert isinstance(editor, AutoregressiveModel)
    assert isinstance(editor.grammar, Grammar)


def test_codes_and_decoded_images_match_the_autoencoder(editor):
    picture = tiny_models.image(3, 16, 24)
    pixels = torch.from_numpy(np.array(picture)).float().permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        expected = editor.vq.encode(pixels, torch.tensor([[16, 24]]), return_dict=True).image_tokens[0]
        again = editor.vq.decode(expected[None])[0]
    codes = editor.encode_codes([picture, tiny_models.image(4, 16, 24)])
    assert torch.equal(codes[0], expected)
    shown = editor.decode_codes(codes[:1])[0]
    assert shown.size == (24, 16)
    seen = torch.from_numpy(np.array(shown)).float().permute(2, 0, 1)
    assert (seen - (again.clamp(-1, 1) + 1) * 127.5).abs().max() <= 0.51


def test_image_token_ids_convert_back_to_codes_and_malformed_ids_give_none(editor):
    codes = editor.encode_codes([tiny_models.image(5, 16, 24)])[0]
    ids = editor.words.image_ids(codes)[1:]  # boi is the prefill
    assert torch.equal(editor.codes_in(ids), codes)
    place = ids.index(editor.words.img) + 1
    assert editor.codes_in(ids[: place + 3]) is None
    assert editor.codes_in([*ids[:place], editor.words.eol, *ids[place + 1 :]]) is None
    assert editor.codes_in([*ids, editor.words.img]) is None
    assert editor.codes_in(editor.words.text_ids("no picture")) is None


def test_target_ids_and_demonstrations_contain_the_target_image(editor):
    target = tiny_models.image(7, 16, 24)
    task = dataclasses.replace(tasks()[0], target=target)
    codes = editor.encode_codes([target])[0]
    (drawn,) = editor.target_ids([task])
    assert torch.equal(editor.codes_in(drawn), codes)
    batch = tiny_writing.batch((task,), group_size=2)
    shown = tiny_writing.policy(writer=editor, sampling={"max_new_tokens": len(drawn) + 1}).demonstrate(batch)
    assert [list(written.ids) for written in shown.outputs] == [drawn] * 2
    assert shown.mask.sum(1).tolist() == [codes.numel()] * 2
    with pytest.raises(ValueError, match="no target image"):
        editor.target_ids(tasks()[:1])


@pytest.mark.parametrize("prefill", [DRAW, THINK])
def test_target_ids_contain_the_thought_before_the_image_and_the_text_of_a_completion_has_no_size(prefill):
    made = tiny_emu3.editor(prefill=prefill)
    task = dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24))
    text = "3*3 circles, so 2*3" if prefill == THINK else ""
    if prefill == THINK:
        with pytest.raises(ValueError, match="'thought'"):
            made.target_ids([task])
    (drawn,) = made.target_ids([dataclasses.replace(task, meta={"thought": text})])
    told = made.words.tokenizer.decode(drawn[: drawn.index(made.words.img)])
    size = f"{made.grid[0]}*{made.grid[1]}"
    assert told == (f"{text}{END_OF_THOUGHT}{BOI}{size}" if prefill == THINK else size)
    assert made.codes_in(drawn) is not None
    assert made.codes_in(drawn[:-6]) is None
    assert made.decode(drawn) == text
    cut = drawn.index(made.words.img) - 1  # the last digit of the size is missing
    assert made.decode(drawn[:cut]) == text
    assert made.decode([made.words.boi, *made.words.text_ids("no picture")]) == "no picture"


@pytest.mark.parametrize(
    ("prefill", "train"),
    [(DRAW, "lora"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((DRAW, "full"), (THINK, "lora")))],
)
@pytest.mark.parametrize(
    "sampling", slow_except([{"temperature": 0.7, "top_p": 0.9}], [{}, {"temperature": 0.7, "top_p": 0.9}]), ids=str
)
def test_policy_passes_the_contract_checks(prefill, train, sampling):
    made = tiny_emu3.editor(prefill=prefill, train=train)
    height, width = made.grid
    longest = len(made.words.header(height, width)) + height * (width + 1) + 3 + (12 if prefill == THINK else 0)
    policy = tiny_writing.policy(writer=made, train=train, sampling={"max_new_tokens": longest, **sampling})
    batch = tiny_writing.batch(tasks()[:2])
    check_policy(policy, batch, needs=Needs(kl="k3"))
    trajectory = policy.rollout(batch)
    if prefill == DRAW:
        drawn = trajectory.mask.sum(1)
        assert drawn.tolist() == [height * width] * len(batch)
        assert set(trajectory.kind[trajectory.mask].tolist()) == {Kind.IMAGE_TOKEN}
        assert not any(written.truncated for written in trajectory.outputs)


def test_grammar_allows_text_before_or_instead_of_an_image():
    made = tiny_emu3.editor(prefill=THINK)
    prompts = made.encode(tasks()[:1])
    words = made.words
    text = made.words.text_ids("hm")
    ids = torch.tensor([[*text, words.boi, *words.header(*made.grid)]])
    vocabulary, forced = made.grammar.parse(prompts, ids)
    header = words.header(*made.grid)
    assert vocabulary[0].tolist() == [0] * 3 + [1] * (len(header) + 1)
    assert forced[0].tolist() == [-1] * 3 + header + [-1]
    assert made.grammar.vocabularies[0, words.eos]
    assert not made.grammar.vocabularies[0, [words.img, words.eol, words.eof, words.eoi, words.pad]].any()
    assert not (made.grammar.vocabularies[0] & made.grammar.vocabularies[1]).any()
    assert made.codes_in([*text]) is None


def test_malformed_image_without_the_grammar_decodes_to_none():
    made = tiny_emu3.editor(grammar=False)
    longest = len(made.target_ids([dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24))])[0]) + 1
    policy = tiny_writing.policy(writer=made, sampling={"max_new_tokens": longest})
    batch = tiny_writing.batch(tasks(), group_size=2)
    trajectory = policy.rollout(batch)
    assert torch.equal(trajectory.mask.sum(1), trajectory.lengths)  # nothing is forced
    images = CodesDecoder(made)([batch.tasks[k] for k in batch.group], trajectory)
    assert images == [None] * len(batch)
    # Ids that form a whole image are decoded, and all tokens after the header have the kind IMAGE_TOKEN.
    shown = policy.demonstrate(tiny_writing.batch((dataclasses.replace(tasks()[0], target=tiny_models.image(7, 16, 24)),)))
    assert CodesDecoder(made)(batch.tasks[:1], shown)[0] is not None
    assert shown.kind[0].tolist().count(Kind.IMAGE_TOKEN) == longest - len(made.words.header(*made.grid))


def test_rows_without_a_complete_image_decode_to_none(editor):
    codes = editor.encode_codes([tiny_models.image(k, 16, 24) for k in range(3)])
    whole = [tuple(editor.words.image_ids(each)[1:]) for each in codes]
    key = (0, 0, 0, 0)
    outputs = [
        Completion(ids=whole[0], text="", truncated=False, key=key),
        Completion(ids=whole[1], text="", truncated=True, key=key),
        Completion(ids=whole[1][:6], text="", truncated=False, key=key),
        Completion(ids=whole[2], text="", truncated=False, key=key),
    ]
    images = CodesDecoder(editor, batch=1)([tasks()[0]] * 4, SimpleNamespace(outputs=outputs))
    assert [image is None for image in images] == [False, True, True, False]
    expected = editor.decode_codes(codes[[0, 2]])
    assert [images[0].tobytes(), images[3].tobytes()] == [image.tobytes() for image in expected]
    assert isinstance(editor, DecodesCodes)


def test_invalid_tasks_settings_and_folders_raise(editor, folder, original, tmp_path):
    (language, autoencoder), other = original, tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((autoencoder / "config.json").read_text())
    weights = load_file(autoencoder / "m.safetensors")
    weights["encoder.other"] = weights.pop("quant_conv.conv.weight")
    save_file(weights, other / "m.safetensors")
    read = partial(load_emu3, **SETTINGS)
    for message, call in (
        ("0 images", lambda: editor.encode([Task(id="x", instruction="red")])),
        ("special token", lambda: editor.encode([tiny_models.task("x", f"red {EOS}", tiny_models.image(0))])),
        ("multiples of", lambda: Emu3Editor(editor.module, tiny_emu3.tokenizer(), vq=editor.vq, size=(15, 24))),
        ("has no token", lambda: Emu3Editor(editor.module, tiny_models.qwen_tokenizer(), vq=editor.vq, size=(16, 24))),
        (r"no config\.json", lambda: read(tmp_path, tokenizer=folder)),
        ("type 'Emu3VisionVQ'", lambda: read(autoencoder, tokenizer=folder)),
        ("Emu3-VisionTokenizer", lambda: read(language, tokenizer=folder)),
        (r"tokenizer\.json", lambda: read(language, autoencoder=autoencoder)),
        (r"missing .*quant_conv.*unexpected .*other", lambda: read(language, tokenizer=folder, autoencoder=other)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Emu3 from folders, in transformers' layout and in the original one

SETTINGS = {"size": tiny_emu3.SIZE, "prefill": DRAW, "dtype": torch.float32, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("emu3")
    tiny_emu3.module(deep=True).save_pretrained(path)
    tiny_emu3.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def original(folder, tmp_path_factory):
    """The same weights under the names of the original layout, in two folders."""
    language, autoencoder = tmp_path_factory.mktemp("language"), tmp_path_factory.mktemp("autoencoder")
    weights = tiny_emu3.module(deep=True).state_dict()  # as the class names them
    config = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in config["text_config"].items() if name != "rope_parameters"}
    (language / "config.json").write_text(
        json.dumps(text | {"model_type": "Emu3", "rope_theta": 1_000_000.0, "rope_scaling": None})
    )
    vq = config["vq_config"]
    told = {
        name: vq[name]
        for name in ("codebook_size", "embed_dim", "num_res_blocks", "attn_resolutions", "temporal_downsample_factor")
    }
    told |= {"ch": vq["base_channels"], "ch_mult": vq["channel_multiplier"], "z_channels": vq["latent_channels"], "double_z": False}
    told |= {"in_channels": 3, "out_channels": 3, "dropout": 0.0, "model_type": "Emu3VisionVQ"}
    (autoencoder / "config.json").write_text(json.dumps(told))
    save_file(
        {n.replace("model.text_model.", "model."): w for n, w in weights.items() if "vqmodel" not in n}, language / "m.safetensors"
    )
    save_file({_original_name(n): _convolution(n, w) for n, w in weights.items() if "vqmodel" in n}, autoencoder / "m.safetensors")
    return language, autoencoder


def _original_name(name):
    """The name of the weight in BAAI's autoencoder."""
    name = name.removeprefix("model.vqmodel.")
    for ours, theirs in (("_proj.", "."), (".out.", ".proj_out."), (".down_block.down.", ".down."), (".up_block.up.", ".up.")):
        name = name.replace(ours, theirs)
    for stage in range(3):
        name = name.replace(f".attn_norms.{stage}.", f".attn.{stage}.norm.")
    return name.replace(".middle_block.attn_norm.", ".mid.attn_1.norm.").replace(".middle_block.", ".mid.")


def _convolution(name, weight):
    return weight[:, :, None, None].clone() if "_proj.weight" in name else weight


def model_outputs(editor):
    task = Task(id="a", instruction="make it red", images=(tiny_models.image(0, 16, 24),), target=None, tags={}, meta={})
    prompts = editor.encode([task])
    states, _ = editor.prefill(editor.module, prompts)
    return prompts.ids, editor.logits(editor.module, states), editor.decode_codes(editor.encode_codes(task.images))[0]


def test_both_folder_layouts_load_the_same_model(folder, original):
    expected = model_outputs(load_emu3(folder, **SETTINGS))
    language, autoencoder = original
    names = load_file(autoencoder / "m.safetensors")
    assert {"encoder.mid.attn_1.q.weight", "encoder.mid.attn_1.norm.weight", "encoder.down.1.attn.0.norm.weight"} <= names.keys()
    found = model_outputs(load_emu3(language, autoencoder=autoencoder, tokenizer=folder, **SETTINGS))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert found[2].tobytes() == expected[2].tobytes()


def test_export_for_vllm_is_a_llama_model_with_the_same_logits(folder, tmp_path):
    editor = load_emu3(folder, **SETTINGS)
    save_for_vllm(editor, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    served = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True).eval()
    assert served.state_dict().keys() == editor.module.state_dict().keys()
    ids = model_outputs(editor)[0]
    with torch.no_grad():
        assert torch.equal(served(ids).logits, editor.module(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).get_vocab() == editor.words.tokenizer.get_vocab()


@pytest.mark.parametrize("layout", ["transformers", "original"])
def test_autoencoder_stays_in_fp32_when_the_model_is_loaded_in_bfloat16(folder, original, layout):
    where = (
        {"source": folder} if layout == "transformers" else {"source": original[0], "autoencoder": original[1], "tokenizer": folder}
    )
    editor = load_emu3(**where, **SETTINGS | {"dtype": torch.bfloat16})
    exact = load_emu3(folder, **SETTINGS)
    assert {p.dtype for p in editor.module.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(editor.vq.state_dict().values(), exact.vq.state_dict().values(), strict=True))
