"""HPSv3 and EditReward: mu of the published procedure, computed by hand, on tiny random models stored as the published ones are."""

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import retouch_rewards
import tiny_writers
from pictures import picture
from retouch.types import Sample, Task
from retouch_rewards.clip import EditReward, HPSv3Reward
from retouch_rewards.weights import MissingWeights
from retouch_worlds.testing import check_reward

REWARD = "<|Reward|>"
PIXELS = 256 * 28 * 28
KINDS = {"hpsv3": "qwen2-vl", "editreward": "qwen2.5-vl"}
HEADS = {"hpsv3": ["rm_head"], "editreward": ["rm_heads.head_0", "rm_heads.head_1"]}


SAMPLES = [
    Sample(Task(f"t{k}", words, images=(picture(50 + k, (30, 30)),)), picture(k, (40, 28) if k else (640, 400)))
    for k, words in enumerate(["a {cat} with 2 hats", "red", "red"])
]


def head(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(32, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.05)]
        return torch.nn.Sequential(*layers, torch.nn.Linear(1024, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).eval()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folders as the published code writes them: embeddings for exactly the tokenizer's tokens and the reward token, a language
    head that is not used, and for HPSv3 the names of transformers before 4.52."""
    found = {}
    for name, kind in KINDS.items():
        folder = tmp_path_factory.mktemp(name)
        model = tiny_writers.module(kind)
        plain = copy.deepcopy(tiny_writers.tokenizer())
        for part in (model.config, plain, tiny_writers.image_processor(kind)):
            part.save_pretrained(folder)
        plain.add_special_tokens({"additional_special_tokens": [REWARD]})
        model.resize_token_embeddings(len(plain))
        tensors = dict(model.state_dict())
        if name == "hpsv3":
            new = {"model.visual.": "visual.", "model.language_model.": "model."}
            for prefix, old in new.items():
                tensors = {(key.replace(prefix, old) if key.startswith(prefix) else key): value for key, value in tensors.items()}
        for seed, part in enumerate(HEADS[name]):
            tensors |= {f"{part}.{key}": value for key, value in head(seed).state_dict().items()}
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
        found[name] = folder, model.eval(), plain
    return found


def published(model, tokenizer, prompt, images, layers):
    """Mu as the published code computes it: the whole conversation at once, embeddings of images put into those of the text, and
    no positions given."""
    seen = [Image.Image.resize(image, size(image), Image.Resampling.BICUBIC) for image in images]
    kind = "qwen2-vl" if model.config.model_type == "qwen2_vl" else "qwen2.5-vl"
    pixels = tiny_writers.image_processor(kind)(images=seen, do_resize=False, return_tensors="pt")
    runs = ["<|image_pad|>" * int(count) for count in pixels["image_grid_thw"].prod(-1) // 4]
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    text += "".join(f"<|vision_start|>{run}<|vision_end|>" for run in runs) + prompt + "<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        shown = torch.cat(model.model.get_image_features(**pixels).pooler_output)
        mask = (ids == model.config.image_token_id)[..., None].expand_as(embedded)
        states = model.model.language_model(
            inputs_embeds=embedded.masked_scatter(mask, shown), attention_mask=torch.ones_like(ids)
        ).last_hidden_state
        (place,) = (ids[0] == tokenizer.convert_tokens_to_ids(REWARD)).nonzero().flatten().tolist()
        return layers(states)[0, place, 0].item()


def size(image, side=16):
    """(width, height) in multiples of ``side``: of at most 256 * 28 * 28 pixels for larger images, of at least as many for smaller
    ones, as qwen-vl-utils computes them."""
    width, height = image.size
    scale = math.sqrt(PIXELS / (width * height))
    fit = math.floor if scale < 1 else math.ceil
    return fit(width * scale / side) * side, fit(height * scale / side) * side


RATED = "\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n"


def prompt_of(name):
    return Path(retouch_rewards.__path__[0], "prompts", f"{name}.txt").read_text(encoding="utf-8")


def test_hpsv3_is_mu_of_the_published_procedure(stored):
    folder, model, tokenizer = stored["hpsv3"]
    reward = HPSv3Reward(path=folder, dtype="float32")
    scores, text = reward(SAMPLES)["hpsv3"], prompt_of("hpsv3")
    begin = "\nYou are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a overall score"
    assert text.startswith(begin)
    assert text.endswith("original description.\nTextual prompt - {text_prompt}\n\n\n" + RATED.partition(REWARD)[0])
    for row, sample in enumerate(SAMPLES[:2]):
        asked = text.format(text_prompt=sample.task.instruction) + RATED.partition(": ")[2]
        assert scores[row].item() == pytest.approx(published(model, tokenizer, asked, [sample.image], head(0)), abs=1e-4)
    assert scores.std() > 1e-4
    check_reward(reward, SAMPLES)
    # An instruction cannot contain the reward token.
    ids = reward.model.tokenizer("a <|Reward|> b", split_special_tokens=True)["input_ids"]
    assert reward.model.tokenizer.convert_tokens_to_ids(REWARD) not in ids
    assert math.isfinite(reward.model.score([picture(1)], "a <|Reward|><|image_pad|> b"))


def test_editreward_is_the_mean_of_two_heads_with_a_prompt_each(stored):
    folder, model, tokenizer = stored["editreward"]
    reward = EditReward(path=folder, dtype="float32")
    scores = reward(SAMPLES[:2])
    for seed, name in enumerate(("following", "quality")):
        text = prompt_of(f"editreward-{name}")
        assert text.endswith("\n\nText instruction - {text_prompt}\n" + RATED.partition(REWARD)[0])
        for row, sample in enumerate(SAMPLES[:2]):
            asked = text.format(text_prompt=sample.task.instruction) + RATED.partition(": ")[2]
            pair = [*sample.task.images, sample.image]
            assert scores[name][row].item() == pytest.approx(published(model, tokenizer, asked, pair, head(seed)), abs=1e-4)
    torch.testing.assert_close(scores["editreward"], (scores["following"] + scores["quality"]) / 2)
    assert EditReward(path=folder, dtype="float32")([Sample(SAMPLES[0].task, None)])["editreward"].tolist() == [-20]
    with pytest.raises(ValueError, match="has no source image"):
        reward([Sample(Task("t", "red"), picture(1))])


def test_the_system_message_is_that_of_the_folders_chat_template(stored, tmp_path):
    folder = tmp_path / "mimo"
    shutil.copytree(stored["editreward"][0], folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    turn = "{{'<|im_start|>system\nYou are MiMo.<|im_end|>\n<|im_start|>user\n' + messages[0]['content'] + '<|im_end|>\n'}}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": turn}))
    model = EditReward(path=folder, dtype="float32").model
    assert model.turn == "<|im_start|>system\nYou are MiMo.<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("rm_heads.head_1.3.bias"), "the head rm_heads.head_1 has the weights 0.bias, .*no layers"),
        (lambda tensors: tensors.pop("model.language_model.norm.weight"), "has no weights language_model.norm.weight"),
        (lambda tensors: tensors.pop("model.language_model.embed_tokens.weight"), "have 0 embeddings, but the tokenizer gives"),
        (None, r"pickles are not read.*weights_only=True\), 'model.safetensors'\)"),
    ],
)
def test_weights_of_another_model_a_pickle_and_an_incomplete_download_are_refused(stored, tmp_path, change, message):
    shutil.copytree(stored["editreward"][0], tmp_path / "changed")
    file = tmp_path / "changed" / "editreward.safetensors"
    if change is None:
        file.rename(tmp_path / "changed" / "model.pth")
    else:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        EditReward(path=tmp_path / "changed").build()
    both = r"HPSv3\.safetensors --local-dir weights/hpsv3 && hf download Qwen/Qwen2-VL-7B-Instruct config\.json"
    with pytest.raises(MissingWeights, match=both):
        HPSv3Reward().build()
